"""Masks on CUDA logits: what is served, what is left to stock, and how it ends. On CPU tensors, with the CPU's lane."""

from __future__ import annotations

import logging
from collections import defaultdict

import numpy as np
import plain
import pytest
import torch

from vllm_speedups.masks.cuda import CudaMasks, usable
from vllm_speedups.masks.kernels import mask_rows
from vllm_speedups.masks.lanes import Lane
from vllm_speedups.masks.resident import ResidentMasks

ROWS = np.array([[1, 0], [2, -1]], dtype=np.int32)


def made(kernel=mask_rows, budget: int = 2**20) -> CudaMasks:
    def make(device, words, budget, counters):
        return ResidentMasks(Lane(), kernel, device, words, budget, counters)

    return CudaMasks(budget, defaultdict(int), make)


class Stock:
    """Masks as stock would, and counts how often it was asked."""

    def __init__(self, logits: torch.Tensor, rows: np.ndarray, targets):
        self.logits, self.rows, self.targets, self.calls = logits, rows, targets, 0

    def __call__(self) -> None:
        self.calls += 1
        for target, row in zip(self.targets, self.rows):
            self.logits[target] = plain.masked(self.logits[target], row, min(self.logits.shape[1], 64))


def step(masks: CudaMasks, logits: torch.Tensor, rows=ROWS, targets=(0, 1), **more) -> tuple:
    """(whether it was served, how often stock was asked)."""
    stock = Stock(logits, rows, targets)
    return masks.apply(logits, rows, targets, stock, **more), stock.calls


@pytest.mark.parametrize("dtype", plain.DTYPES)
def test_the_first_step_of_a_dtype_is_compared_with_stock_and_then_stock_is_not_asked(dtype):
    masks, random = made(), np.random.default_rng(0)
    for asked in (1, 0, 0):
        logits = plain.logits(random, 3, 64, dtype)
        expected = logits.clone()
        Stock(expected, ROWS, (0, 1))()
        assert step(masks, logits) == (True, asked)
        assert plain.bits(logits) == plain.bits(expected)


def test_another_dtype_is_compared_anew():
    masks = made()
    asked = [step(masks, torch.zeros(2, 64, dtype=dtype))[1] for dtype in (*plain.DTYPES, *plain.DTYPES)]
    assert asked == [1, 1, 1, 0, 0, 0]


def test_a_difference_ends_it_with_one_line_and_the_logits_are_stocks(said):
    def wrong(logits, *arguments) -> None:
        mask_rows(logits, *arguments)
        logits[0, 5] = 1.0

    masks, logits = made(wrong), torch.zeros(2, 64)
    assert step(masks, logits) == (True, 1)
    assert logits[0].isfinite().nonzero().tolist() == [[0]]
    assert step(masks, torch.zeros(2, 64)) == (False, 0)
    (line,) = said.texts(logging.WARNING)
    assert "masks on CUDA are off" in line and "other logits than stock" in line


def test_a_step_that_is_verified_is_compared_with_stock_and_a_difference_told_with_stocks_bits_left():
    wrong, facts = [False], []

    def kernel(logits, *arguments) -> None:
        mask_rows(logits, *arguments)
        if wrong[0]:
            logits[1, 7] = 3.0

    masks = made(kernel)
    assert [step(masks, torch.zeros(2, 64), differed=facts.append) for _ in range(2)] == [(True, 1)] * 2 and not facts
    wrong[0], logits = True, torch.zeros(2, 64)
    assert step(masks, logits, differed=facts.append) == (True, 1)
    assert logits[1, 7] == -torch.inf and facts[0]["first that differs"] == [1, 7] and len(facts) == 1
    assert step(masks, torch.zeros(2, 64)) == (False, 0)


def test_an_error_ends_it_with_one_line_and_leaves_the_step_to_stock(said):
    def failing(*_) -> None:
        raise RuntimeError("no such kernel")

    masks = made(failing)
    assert step(masks, torch.zeros(2, 64)) == (False, 0) == step(masks, torch.zeros(2, 64))
    (line,) = said.texts(logging.WARNING)
    assert "no such kernel" in line


def test_what_stock_raises_is_raised_and_nothing_ends(said):
    masks = made()

    def stock() -> None:
        raise KeyError("a request that stock does not know either")

    with pytest.raises(KeyError):
        masks.apply(torch.zeros(2, 64), ROWS, (0, 1), stock)
    assert step(masks, torch.zeros(2, 64)) == (True, 1) and not said.texts(logging.WARNING)


STARTS = torch.tensor([0, 1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("logits", "more"),
    [
        (torch.zeros(2, 64, dtype=torch.float64), {}),
        (torch.zeros(128), {}),
        (torch.zeros(64, 2).t(), {}),
        (torch.zeros(2, 128)[:, ::2], {}),
        (torch.zeros(2, 64), {"rows": ROWS.astype(np.int64)}),
        (torch.zeros(2, 64), {"rows": ROWS[0]}),
        (torch.zeros(2, 64), {"targets": (0,)}),
        (torch.zeros(2, 64), {"targets": (0, 2)}),
        (torch.zeros(2, 64), {"targets": (0, -1)}),
        (torch.zeros(2, 64), {"targets": (1, 1)}),
        (torch.zeros(2, 64), {"starts": STARTS, "stride": 0}),
        (torch.zeros(2, 64), {"starts": STARTS.long(), "stride": 1}),
        (torch.zeros(2, 64), {"starts": STARTS.repeat(2)[::2], "stride": 1}),
        (torch.zeros(2, 64), {"starts": STARTS[:2], "stride": 1}),
        (torch.zeros(2, 80), {"starts": STARTS, "stride": 1}),
        (torch.zeros(2, 64), {"starts": STARTS.to("meta"), "stride": 1}),
        (torch.zeros(2, 64, device="meta"), {}),
    ],
)
def test_the_unexpected_is_left_to_stock_and_the_expected_served_afterwards(logits, more):
    masks = made()
    assert step(masks, torch.zeros(2, 64)) == (True, 1)
    assert masks.apply(logits, **{"rows": ROWS, "targets": (0, 1), "stock": pytest.fail, **more}) is False
    assert step(masks, torch.zeros(2, 64)) == (True, 0)


def test_rows_of_another_width_are_left_to_stock():
    masks = made()
    step(masks, torch.zeros(2, 64))
    assert masks.apply(torch.zeros(2, 64), np.zeros((2, 3), dtype=np.int32), (0, 1), pytest.fail) is False


def test_logits_on_the_cpu_are_not_for_cuda():
    assert not usable(torch.zeros(2, 64))
