"""Interning: equal rows and only those share a mask, the budget holds, and the account of bytes is exact."""

from __future__ import annotations

import numpy as np
import plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_speedups.masks import interning
from vllm_speedups.masks.interning import MaskTable

LARGE, ENTRY = 2**30, interning.ENTRY_BYTES


def account(table: MaskTable) -> int:
    """The bytes that a table holds, counted anew."""
    masks = table._masks.values()
    for mask in masks:
        assert mask.nbytes == ENTRY + mask.row.nbytes + sum(form.nbytes for form in mask.forms.values())
    return sum(mask.nbytes for mask in masks)


def rows_of(numbers, words: int = 3) -> np.ndarray:
    return np.array([[number] * (words - 1) + [7] for number in numbers], dtype=np.int32).reshape(-1, words)


batches = st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=15)


@pytest.mark.parametrize("words", [2, 3])
@given(batches=batches)
def test_equal_rows_and_only_those_share_a_mask(words, batches):
    table, known = MaskTable(LARGE), {}
    for batch in batches:
        rows = rows_of(batch, words)
        for number, row, mask in zip(batch, rows, table.intern(rows)):
            assert mask.row.tolist() == row.tolist()
            assert known.setdefault(number, mask) is mask
        table.trim()
    assert len({mask.id for mask in known.values()}) == len(known) == len(table)
    count = sum(map(len, batches))
    assert table.counters["hits"] + table.counters["misses"] == count and table.counters["misses"] == len(known)
    assert sum(mask.uses for mask in known.values()) == count


def test_a_mask_does_not_follow_the_array_that_it_was_made_from():
    table, rows = MaskTable(LARGE), rows_of([1, 2])
    masks = table.intern(rows)
    rows[:] = 9
    assert [mask.row.tolist() for mask in masks] == rows_of([1, 2]).tolist()


def test_rows_of_other_widths_are_other_masks():
    table = MaskTable(LARGE)
    (narrow,), (wide,) = table.intern(np.zeros((1, 2), np.int32)), table.intern(np.zeros((1, 4), np.int32))
    assert narrow is not wide and (len(narrow.row), len(wide.row)) == (2, 4)


@pytest.mark.parametrize("hashes", [hash, lambda key: 5], ids=["hashed", "hash shared too"])
@pytest.mark.parametrize("budget", [LARGE, 200 + ENTRY, 0])
@given(batches=batches)
@settings(deadline=None)
def test_rows_that_share_a_fingerprint_are_still_told_apart(budget, hashes, batches):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interning, "fingerprints", lambda rows: [5] * len(rows))
        patch.setattr(interning, "hash", hashes, raising=False)
        table = MaskTable(budget)
        for batch in batches:
            rows = rows_of(batch)
            masks = table.intern(rows)
            assert [mask.row.tolist() for mask in masks] == rows.tolist()
            for mask in masks:
                form = table.form(mask, 96)
                assert type(form)(mask.row, 96).nbytes == form.nbytes
            assert table.nbytes == account(table) and (hashes is hash or len(table) <= 2)
            table.trim()
            assert table.nbytes == account(table) <= max(budget, 0)


@pytest.mark.parametrize("budget", [0, 1, ENTRY + 12, ENTRY + 30, 500 + 3 * ENTRY, 5_000])
@given(batches=batches, random=plain.randoms)
@settings(deadline=None, max_examples=50)
def test_the_budget_holds_after_every_batch_and_the_account_is_exact(budget, batches, random):
    table = MaskTable(budget)
    for batch in batches:
        masks = table.intern(rows_of(batch))
        for mask in masks:
            table.form(mask, int(random.choice([96, 80, 33])))
            assert table.nbytes == account(table)
        table.trim()
        assert table.nbytes == account(table) <= budget
    if budget == 0:
        assert len(table) == 0 and table.counters["hits"] == sum(len(b) - len(set(b)) for b in batches)


def test_rows_that_the_fingerprint_cannot_tell_apart_are_all_kept():
    rows = np.zeros((4, 4), np.int32)
    for row, words in zip(rows, ((), (1, 3), (3,), (1,))):
        row[list(words)] = -(2**31)
    table = MaskTable(LARGE)
    masks = table.intern(rows)
    assert (
        table.intern(rows) == masks and len(table) == 4 and table.counters == {"hits": 4, "misses": 4, "evictions": 0}
    )


def test_the_least_recently_used_is_forgotten_first():
    table = MaskTable(budget=3 * (12 + ENTRY))
    a, b, c = table.intern(rows_of([1, 2, 3]))
    table.intern(rows_of([1]))
    table.intern(rows_of([4]))
    table.trim()
    assert table.counters["evictions"] == 1
    assert table.intern(rows_of([1, 3])) == [a, c]
    assert table.intern(rows_of([2])) != [b]


def test_the_masks_of_the_batch_at_hand_stay_until_it_is_done():
    table = MaskTable(budget=0)
    masks = table.intern(rows_of([1, 2, 1, 2]))
    assert masks[0] is masks[2] and masks[1] is masks[3] and len(table) == 2
    table.trim()
    assert len(table) == 0 and table.nbytes == 0 and table.counters["evictions"] == 2


def test_a_form_is_kept_from_the_second_use_on_and_one_a_vocabulary():
    table = MaskTable(LARGE)
    (mask,) = table.intern(rows_of([1]))
    table.form(mask, 96)
    assert mask.forms == {} and table.nbytes == ENTRY + mask.row.nbytes
    table.intern(rows_of([1]))
    form = table.form(mask, 96)
    assert table.form(mask, 96) is form and table.form(mask, 90) is not form
    assert set(mask.forms) == {96, 90} and table.nbytes == account(table)


def test_a_form_of_a_mask_that_was_forgotten_meanwhile_is_not_counted():
    table = MaskTable(budget=0)
    (mask,) = table.intern(rows_of([1]))
    table.intern(rows_of([1]))
    table.trim()
    table.form(mask, 96)
    assert table.nbytes == 0 == account(table)
    (again,) = table.intern(rows_of([1]))
    assert again.id > mask.id and table.nbytes == account(table)
