"""Resident masks: logits end as a plain loop leaves them, on a device that does what it is asked as late as it may."""

from __future__ import annotations

import random as randomly
from collections import defaultdict

import numpy as np
import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_speedups.masks import resident
from vllm_speedups.masks.kernels import mask_rows
from vllm_speedups.masks.lanes import Lane
from vllm_speedups.masks.resident import ResidentMasks


class LateLane(Lane):
    """A device with a queue of its own: nothing happens until it has to, or chance has it so.

    What an upload reads and what a kernel reads is what is there when it happens, as on a GPU.
    """

    def __init__(self, seed: int = 0, eagerness: float = 0.0):
        self.queue: list = []
        self._random, self._eagerness = randomly.Random(seed), eagerness
        self.inside = False

    def enter(self, held: list) -> None:
        assert not self.inside
        self.inside = True

    def leave(self) -> None:
        self.inside = False

    def upload(self, target, source) -> None:
        self._ask(lambda: target.copy_(source))

    def launch(self, function, *arguments) -> None:
        self._ask(lambda: function(*arguments))

    def event(self):
        return _Event(self)

    def record(self, event) -> None:
        event.passed = False
        self._ask(event.passes)

    def drain(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def _ask(self, what) -> None:
        assert self.inside
        self.queue.append(what)
        while self.queue and self._random.random() < self._eagerness:
            self.queue.pop(0)()


class _Event:
    def __init__(self, lane: LateLane):
        self.passed, self._lane = True, lane

    def passes(self) -> None:
        self.passed = True

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        while not self.passed:
            self._lane.queue.pop(0)()


def made(lane, words: int, rows: int, kernel=mask_rows) -> ResidentMasks:
    return ResidentMasks(lane, kernel, torch.device("cpu"), words, rows * 4 * words, defaultdict(int))


def expected_of(logits: torch.Tensor, rows: np.ndarray, targets: list) -> list:
    result = logits.clone()
    for target, row in zip(targets, rows):
        result[target] = plain.masked(logits[target], row, min(logits.shape[1], rows.shape[1] * 32))
    return plain.bits(result)


@st.composite
def runs(draw):
    """Steps of a server: logits, rows and the logits that they are for, rows coming back or not."""
    random, words = draw(plain.randoms), draw(st.integers(1, 4))
    width = draw(st.integers(1, words * 32 + 20))
    known = [plain.row(random, words, draw(plain.shares)) for _ in range(draw(st.integers(1, 12)))]
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        targets = draw(st.lists(st.integers(0, 6), unique=True, max_size=7))
        rows = [known[draw(st.integers(0, len(known) - 1))] for _ in targets]
        rows = np.array(rows, dtype=np.int32).reshape(len(targets), words)
        steps.append((plain.logits(random, 7, width, draw(st.sampled_from(plain.DTYPES))), rows, targets))
    return words, steps


@pytest.mark.parametrize("new_rows", [64, 2])
@pytest.mark.parametrize("capacity", [7, 30])
@given(run=runs(), seed=st.integers(0, 99), eagerness=st.sampled_from([0.0, 0.3, 0.6]))
@settings(max_examples=60, deadline=None)
def test_logits_end_as_a_plain_loop_leaves_them_however_late_the_device_is(capacity, new_rows, run, seed, eagerness):
    words, steps = run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident, "NEW_ROWS", new_rows)
        lane = LateLane(seed, eagerness)
        masks, seen = made(lane, words, capacity), []
        for logits, rows, targets in steps:
            expected = expected_of(logits, rows, targets)
            assert masks.apply(logits, rows, targets)
            seen.append((logits, expected))
        lane.drain()
    for logits, expected in seen:
        assert plain.bits(logits) == expected


def test_only_new_rows_are_sent():
    masks = made(Lane(), 100, 8)
    rows = np.stack([plain.row(np.random.default_rng(seed), 100, 0.5) for seed in range(4)])
    sent = []
    for chosen in ([0, 1, 2], [2, 1, 0], [0, 3, 1]):
        masks.apply(torch.zeros(3, 3200), rows[chosen], [0, 1, 2])
        sent.append(masks.counters["bytes sent"] - sum(sent))
    assert [masks.counters["rows sent"], sent[1]] == [4, 2 * 16]
    assert sent[0] - sent[1] == 3 * 400 + 32 and sent[2] - sent[1] == 400 + 16


def test_the_least_recently_used_row_makes_room():
    masks = made(Lane(), 1, 3)
    sent = []
    for number in (1, 2, 3, 1, 4, 1, 3, 2):
        masks.apply(torch.zeros(1, 32), np.array([[number]], dtype=np.int32), [0])
        sent.append(masks.counters["rows sent"])
    assert sent == [1, 2, 3, 3, 4, 4, 4, 5] and masks.counters["rows replaced"] == 2


def test_a_step_that_needs_more_rows_than_there_is_room_for_is_declined_untouched():
    masks = made(Lane(), 1, 3)
    rows = np.arange(4, dtype=np.int32).reshape(4, 1)
    logits = torch.zeros(4, 32)
    assert not masks.apply(logits, rows, [0, 1, 2, 3]) and torch.equal(logits, torch.zeros(4, 32))
    assert masks.apply(logits, rows[:3], [0, 1, 2])


def test_no_room_at_all_declines_everything_and_no_rows_are_no_work():
    masks = made(Lane(), 4, 0)
    assert not masks.apply(torch.zeros(1, 128), np.zeros((1, 4), dtype=np.int32), [0])
    assert masks.apply(torch.zeros(1, 128), np.zeros((0, 4), dtype=np.int32), [])


@pytest.mark.parametrize("fails", ["upload", "kernel"])
def test_rows_that_may_not_have_arrived_are_sent_again(fails):
    broken = [True]

    class Failing(Lane):
        def upload(self, target, source) -> None:
            if broken[0] and fails == "upload":
                raise RuntimeError("no copy")
            target.copy_(source)

    def kernel(*arguments) -> None:
        if broken[0] and fails == "kernel":
            raise RuntimeError("no launch")
        mask_rows(*arguments)

    masks = made(Failing(), 1, 4, kernel)
    logits, rows = torch.zeros(2, 32), np.array([[1], [2]], dtype=np.int32)
    with pytest.raises(RuntimeError, match="no "):
        masks.apply(logits, rows, [0, 1])
    broken[0] = False
    assert masks.apply(logits, rows, [0, 1])
    assert logits.isfinite().nonzero().tolist() == [[0, 0], [1, 1]]


def test_more_new_rows_than_a_packet_holds_are_sent_in_several():
    masks = made(Lane(), 2, 200)
    random = np.random.default_rng(0)
    rows = np.stack([plain.row(random, 2, 0.5) for _ in range(150)])
    logits = plain.logits(random, 150, 64, torch.float32)
    expected = expected_of(logits, rows, range(150))
    assert masks.apply(logits, rows, range(150)) and plain.bits(logits) == expected


def test_positions_past_what_the_device_says_are_left_alone():
    # Two requests with four rows each; the device says that the first has two logits and the second three.
    masks = made(Lane(), 1, 16)
    rows = np.array([[1 << n] for n in range(8)], dtype=np.int32)
    logits, starts = torch.zeros(6, 32), torch.tensor([0, 2, 5], dtype=torch.int32)
    assert masks.apply(logits, rows, range(8), starts, 4)
    assert [row.isfinite().nonzero().flatten().tolist() for row in logits[:5]] == [[0], [1], [4], [5], [6]]
    assert torch.equal(logits[5], torch.zeros(32))


def test_masks_work_inside_and_outside_of_inference_mode():
    with torch.inference_mode():
        masks = made(Lane(), 1, 4)
        masks.apply(torch.zeros(1, 32), np.array([[1]], dtype=np.int32), [0])
    logits = torch.zeros(1, 32)
    assert masks.apply(logits, np.array([[2]], dtype=np.int32), [0]) and logits.isfinite().nonzero().tolist() == [
        [0, 1]
    ]
