"""vLLM's own scheduler and block manager do the same, step by step, over stock's sequences and over ours."""

from __future__ import annotations

import contextlib

import pytest
import vllm
from packaging.version import Version
from sequences import Run

from vllm_speedups.telemetry import counters

# Later releases give every sample of a request a group of its own.
FORKS = Version(vllm.__version__).release < (0, 6)


@pytest.fixture(autouse=True)
def order_of_blocks(monkeypatch):
    """The first block manager walks sets of blocks, in the order of their addresses: numbers come out the same twice."""
    with contextlib.suppress(ImportError, AttributeError):
        monkeypatch.setattr("vllm.block.PhysicalTokenBlock.__hash__", lambda self: self.block_number)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_the_scheduler_does_the_same_step_by_step(seed, swap, request):
    stock, again = (Run(seed, 100, swap, FORKS).go(120) for _ in range(2))
    assert again.trace == stock.trace, "stock is not the same twice: the test says nothing"
    assert stock.events >= {"computed blocks", "SWAPPED" if swap else "WAITING", *(["fork"] if FORKS else [])}
    request.getfixturevalue("sequence_data")
    ours = Run(seed, 100, swap, FORKS).go(120)
    assert ours.trace == stock.trace
    assert counters("sequence-data")["prompts hashed"]
