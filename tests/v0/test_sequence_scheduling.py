"""vLLM's own scheduler and block manager do the same, step by step, over stock's sequences and over ours."""

from __future__ import annotations

import contextlib

import pytest
import vllm
from packaging.version import Version
from sequences import Run

from vllm_speedups.telemetry import counters

# Later releases give every sample of a request a group of its own.
BLOCKS = 64
FORKS = Version(vllm.__version__).release < (0, 6)


@pytest.fixture(autouse=True)
def order_of_blocks(monkeypatch):
    """The first block manager walks sets of blocks, in the order of their addresses: numbers come out the same twice."""
    with contextlib.suppress(ImportError, AttributeError):
        monkeypatch.setattr("vllm.block.PhysicalTokenBlock.__hash__", lambda self: self.block_number)


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_the_scheduler_does_the_same_step_by_step(swap, request):
    stock, again = (runs(swap) for _ in range(2))
    assert traces(again) == traces(stock), "stock is not the same twice: the test says nothing"
    events = set().union(*(run.events for run in stock))
    assert events >= {"computed blocks", "SWAPPED" if swap else "WAITING", *(["fork"] if FORKS else [])}
    before = counters("sequence-data")["prompts hashed"]
    request.getfixturevalue("sequence_data")
    assert traces(runs(swap)) == traces(stock)
    assert counters("sequence-data")["prompts hashed"] > before + 20


def runs(swap: bool) -> list:
    return [Run(seed, BLOCKS, swap, FORKS).go(120) for seed in range(6)]


def traces(of: list) -> list:
    return [run.trace for run in of]
