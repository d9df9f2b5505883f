"""A revert in the middle of requests, on a real engine: every token is stock's, before it, after it and across it."""

from __future__ import annotations

import pytest

from vllm_speedups.bench.schemas import SCHEMAS

pytestmark = pytest.mark.engine

GUIDES = [{"json": SCHEMAS["bounded"]}, {"regex": r"(red|green|blue)( [a-z]{2,9}){1,4}\."}, None]
PROMPTS = [[1, *range(900 + index, 1000 + index)] for index in range(9)]


@pytest.mark.parametrize("pair", [pytest.param({"backend": "xgrammar"}, id="xgrammar")], indirect=True)
def test_requests_that_a_revert_meets_midway_go_on_with_stocks_tokens(pair):
    stock, patched = pair
    run = {"guide": GUIDES, "temperature": 1.0}
    warm = [engine.generate(PROMPTS, 32, **run) for engine in pair]
    assert warm[0]["ids"] == warm[1]["ids"] and patched.about["patches"]["grammar-masks"] == "applied"
    expected = stock.generate(PROMPTS, 32, **run, revert_at_step=9)
    across = patched.generate(PROMPTS, 32, **run, revert_at_step=9)
    assert across["ids"] == expected["ids"] == warm[0]["ids"]
    after = patched.generate(PROMPTS, 32, **run)
    assert after["ids"] == expected["ids"]
    applied = [answer["counters"]["grammar-masks"].get("hits", 0) for answer in (warm[1], across, after)]
    assert applied[0] < applied[1] == applied[2]
