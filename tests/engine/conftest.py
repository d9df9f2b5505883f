"""Real vLLM engines for the tests: built once for each kind, in processes of their own, on a small model."""

from __future__ import annotations

import pytest

from vllm_speedups.bench.engine import Engine, engine_arguments
from vllm_speedups.bench.models import build_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """The folder of the small model."""
    return str(build_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def pair(request, model):
    """A stock and a patched engine of one kind, `request.param`: arguments of the engine beside the model's."""
    arguments = dict(request.param)
    arguments = engine_arguments(model, arguments.pop("backend", None), **arguments)
    with Engine(arguments, patched=False) as stock, Engine(arguments, patched=True) as patched:
        stock.wait_until_ready()
        patched.wait_until_ready()
        yield stock, patched


@pytest.fixture
def same_ids(pair):
    """Runs prompts through both engines and asserts that every token id is the same. Returns the ids."""

    def check(prompts: list, tokens: int, **run) -> list:
        answers = [engine.generate(prompts, tokens, **run) for engine in pair]
        assert answers[0]["ids"] == answers[1]["ids"]
        aborted = "abort_at_step" in run
        assert all(sequence for request in answers[0]["ids"] for sequence in request) or aborted
        return answers[0]["ids"]

    return check
