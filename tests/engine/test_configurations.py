"""Some of the configurations of `make configurations`, asked little: those that no other test starts."""

from __future__ import annotations

import pytest
from chat_model import build_chat_model
from matrix import CONFIGURATIONS, compare

pytestmark = pytest.mark.engine

CHOSEN = ("server, asynchronous scheduling", "server, chats", "thoughts, n-gram drafts", "tensor parallel 2")


@pytest.fixture(scope="module")
def models(model, tmp_path_factory) -> dict:
    """The folders of both small models."""
    return {"plain": model, "chat": str(build_chat_model(tmp_path_factory.mktemp("chat")))}


@pytest.mark.parametrize("name", CHOSEN)
def test_every_answer_is_the_one_that_stock_gives(name, models):
    for found in compare(CONFIGURATIONS[name], models, scale=0.15):
        assert not found["different"], found["examples"]
        assert not found["errors"] and found["evidence"]
        assert found["guided"] > 300 and found["processes"]
        # Where fills are cheap, as over a small vocabulary, rows are not worth keeping.
        assert found["copied"] > 0 or CONFIGURATIONS[name].chat
