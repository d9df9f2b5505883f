"""Application of packed rows to logits, beside a plain loop, whatever is cached and by how many threads."""

from __future__ import annotations

import threading

import numpy as np
import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_speedups.masks import interning
from vllm_speedups.masks.apply import MaskApplier


def expected_of(logits: torch.Tensor, rows: np.ndarray, indices: list) -> torch.Tensor:
    """The logits after a plain loop over the bits of the rows."""
    result = logits.clone()
    for index, row in zip(indices, rows):
        result[index] = plain.masked(logits[index], row, min(logits.shape[1], rows.shape[1] * 32))
    return result


@st.composite
def steps(draw):
    """Logits of a step, rows for some of them, several alike, wider or narrower than the logits."""
    random = draw(plain.randoms)
    count, words = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    width = draw(st.integers(1, words * 32 + 40))
    indices = draw(st.lists(st.integers(0, count - 1), unique=True))
    pool = [plain.row(random, words, draw(plain.shares)) for _ in range(3)]
    rows = [pool[draw(st.integers(0, 2))] for _ in indices]
    rows = np.ascontiguousarray(np.array(rows, dtype=np.int32).reshape(len(indices), words))
    return plain.logits(random, count, width, draw(st.sampled_from(plain.DTYPES))), rows, indices


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("budget", [2**20, 300, 0])
@given(batches=st.lists(steps(), min_size=1, max_size=4), again=st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_logits_end_as_a_plain_loop_leaves_them_cold_warm_and_evicted(budget, collide, batches, again):
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(interning, "fingerprints", lambda rows: [0] * len(rows))
        applier = MaskApplier(budget)
        for logits, rows, indices in batches * (1 + again):
            got, expected = logits.clone(), expected_of(logits, rows, indices)
            assert applier.supports(got)
            applier.apply(got, rows, indices)
            assert plain.bits(got) == plain.bits(expected)
            assert applier.table.nbytes <= budget


@pytest.mark.parametrize("dtype", plain.DTYPES)
def test_a_slice_of_a_larger_tensor_is_masked_in_place(dtype):
    random = np.random.default_rng(0)
    whole = plain.logits(random, 9, 200, dtype)
    applier = MaskApplier(2**20)
    for repeat in range(3):
        part, expected = whole[::2, 7:107], whole.clone()
        rows = np.stack([plain.row(random, 4, share) for share in (0.01, 0.5, 0.99)])
        expected[::2, 7:107] = expected_of(whole[::2, 7:107].contiguous(), rows, [0, 2, 3])
        assert applier.supports(part)
        applier.apply(part, rows, [0, 2, 3])
        assert plain.bits(whole) == plain.bits(expected), repeat


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(3),
        torch.zeros(1, 2, 3),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(2, 3, device="meta"),
    ],
    ids=["float64", "int32", "one row", "three dimensions", "transposed", "strided", "another device"],
)
def test_other_logits_are_not_supported(logits):
    assert not MaskApplier.supports(logits)


@pytest.mark.parametrize("indices", [[0, 2], [0, -1], [0], [0, 1, 1]])
def test_an_index_out_of_range_is_an_error_before_anything_is_written(indices):
    logits = torch.zeros(2, 40)
    with pytest.raises(IndexError):
        MaskApplier(2**20).apply(logits, np.zeros((2, 2), dtype=np.int32), indices)
    assert torch.equal(logits, torch.zeros(2, 40))


def test_no_rows_leave_the_logits_alone():
    logits = torch.ones(2, 40)
    MaskApplier(2**20).apply(logits, np.zeros((0, 2), dtype=np.int32), [])
    assert torch.equal(logits, torch.ones(2, 40))


def test_threads_that_share_an_applier_do_not_mix_their_masks():
    applier, wrong = MaskApplier(4_000), []
    jobs = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        logits = plain.logits(random, 6, 300 + seed, plain.DTYPES[seed % 3])
        rows = np.stack([plain.row(random, 10, share) for share in (0.005, 0.5, 0.5, 0.99, 0.3, 1)])
        jobs.append((logits, rows, plain.bits(expected_of(logits, rows, list(range(6))))))

    def work(job):
        logits, rows, expected = job
        for _ in range(60):
            got = logits.clone()
            applier.apply(got, rows, range(6))
            if plain.bits(got) != expected:
                wrong.append(job)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and applier.table.nbytes <= 4_000
