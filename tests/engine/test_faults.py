"""Faults in a running engine: a broken cache, a raised error, no memory, a dead thread. No wrong token leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_speedups.bench.engine import Engine, engine_arguments
from vllm_speedups.bench.schemas import SCHEMAS

pytestmark = pytest.mark.engine

GUIDES = [{"json": SCHEMAS["bounded"]}, None, {"regex": r"(red|green|blue)( [a-z]{2,9}){1,4}\."}]
# Long enough for the memo, alike for the most part, and different at the end.
PROMPTS = [[1, *range(2000, 2500), 1000 + index] for index in range(12)]
EVERYTHING = {"VLLM_SPEEDUPS_VERIFY": "1"}


@pytest.fixture(scope="module")
def arguments(model):
    return engine_arguments(model, "xgrammar", max_model_len=1024, enable_prefix_caching=True)


def ids(engine) -> list:
    return [
        engine.generate(PROMPTS, 40, guide=GUIDES, seed=seed, temperature=temperature)["ids"]
        for seed, temperature in ((0, 1.0), (0, 1.0), (50, 1.0), (0, 0.0))
    ]


@pytest.fixture(scope="module")
def expected(arguments) -> list:
    with Engine(arguments, patched=False) as stock:
        return ids(stock)


@pytest.mark.parametrize(
    ("fault", "extra", "reverted"),
    [
        ("corrupt rows", EVERYTHING, {"xgrammar-states": "differences"}),
        ("corrupt masks", EVERYTHING, {"grammar-masks": "differences"}),
        ("flip digests", EVERYTHING, {"block-hashes": "differences"}),
        ("raise", {}, dict.fromkeys(("xgrammar-states", "grammar-masks", "block-hashes"), "failures")),
        ("exhaust memory", {}, dict.fromkeys(("xgrammar-states", "grammar-masks", "block-hashes"), "failures")),
        ("kill threads", {}, {}),
    ],
)
def test_no_wrong_token_leaves_an_engine_in_which_something_of_ours_breaks(arguments, expected, fault, extra, reverted):
    program = [str(Path(__file__).parent / "faulty.py")]
    with Engine(arguments, True, {"FAULT": fault, **extra}, program) as engine:
        assert ids(engine) == expected
        state = {patch["name"]: patch for patch in engine.generate(PROMPTS[:1], 1)["state"]["patches"]}
        said = engine.output()
    for name, patch in state.items():
        why = reverted.get(name)
        assert patch["status"] in (["reverted"] if why else ["applied", "waiting", "not meant", "disabled"])
        assert not why or patch[why] >= 1
        assert bool(why) == (f"{name} was reverted" in said)
    if fault == "kill threads":
        assert "a thread was ended" in said and "networks built" not in state["xgrammar-states"]["counters"]


def test_an_engine_that_verifies_everything_finds_nothing(arguments, expected):
    with Engine(arguments, True, EVERYTHING) as engine:
        assert ids(engine) == expected
        state = {patch["name"]: patch for patch in engine.generate(PROMPTS[:1], 1)["state"]["patches"]}
    for name in ("xgrammar-states", "grammar-masks", "block-hashes"):
        assert state[name]["verified"] > 10 and state[name]["differences"] == 0 and state[name]["status"] == "applied"
