"""The V0 engine, stock and patched in turn: every token id is the same, and the patched one has used its masks."""

from __future__ import annotations

import json

import pytest

from vllm_speedups.bench import engine, models
from vllm_speedups.bench.schemas import SCHEMAS

BATCH, TOKENS = 16, 48
QUICK = [{"regex": r"[a-z]+(-[a-z]+){1,3}"}, {"choice": ["left", "right", "straight on"]}, None]
GUIDES = [
    {"json": SCHEMAS["bounded"]},
    {"json": json.dumps({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})},
    *QUICK,
]
PROMPTS = [[1, 2, 3, 5 + index] for index in range(BATCH)]


@pytest.fixture(scope="module", params=["VLLM_V0_USE_OUTLINES_CACHE", None], ids=["disk cache", "default"])
def pair(request, tmp_path_factory):
    """A stock and a patched engine, with outlines' disk cache, or as vLLM is by default."""
    folder = tmp_path_factory.mktemp("v0")
    arguments = engine.engine_arguments(str(models.build_model(folder / "model")))
    arguments |= {"guided_decoding_backend": "outlines", "max_num_seqs": BATCH}
    extra = {"VLLM_USE_V1": "0", "OUTLINES_CACHE_DIR": str(folder / "outlines")}
    extra |= {request.param: "1"} if request.param else {}
    with engine.Engine(arguments, False, extra) as stock, engine.Engine(arguments, True, extra) as patched:
        # Stock compiles for every request where the disk cache is off.
        yield stock, patched, GUIDES if request.param else QUICK


def test_the_patches_for_this_engine_are_applied(pair):
    stock, patched = (one.wait_until_ready()["patches"] for one in pair[:2])
    assert not stock and patched["fsm-masks"] == "applied"


@pytest.mark.parametrize("run", [{"seed": 0}, {"seed": 100}, {"temperature": 0}, {"seed": 7, "n": 3}])
def test_every_token_id_is_stocks(pair, run):
    stock, patched, guides = pair
    answers = [one.generate(PROMPTS, TOKENS, guide=guides, **run) for one in (stock, patched)]
    assert answers[0]["ids"] == answers[1]["ids"] and answers[0]["tokens"]
    counts = answers[1]["counters"]["fsm-masks"]
    assert counts["hits"] and not counts.get("stock")


def test_a_guide_is_compiled_once_for_all_its_requests(pair):
    _, patched, _ = pair
    before = patched.generate(PROMPTS[:1], 4, guide={"regex": "[0-9]{3}x"})["counters"]["fsm-masks"]["compiled"]
    after = patched.generate(PROMPTS, 4, guide={"regex": "[0-9]{3}x"})["counters"]["fsm-masks"]["compiled"]
    assert after == before
