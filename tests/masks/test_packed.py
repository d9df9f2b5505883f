"""Packed rows against bit loops."""

from __future__ import annotations

import numpy as np
import plain
from hypothesis import given
from hypothesis import strategies as st

from vllm_speedups.masks import packed

masks = st.lists(st.booleans(), max_size=200)


@given(masks)
def test_packing_is_bit_i_of_word_j_for_token_32j_plus_i(allowed):
    row = packed.pack(np.array(allowed, dtype=bool))
    assert row.dtype == np.int32 and row.tolist() == plain.pack(allowed)
    assert packed.words_for(len(allowed)) == len(row)
    assert packed.unpack(row, len(allowed)).tolist() == allowed


@given(plain.randoms, st.integers(1, 9), plain.shares, st.data())
def test_ids_are_those_whose_bit_says_so_below_the_vocabulary(random, words, share, data):
    row = plain.row(random, words, share)
    vocab_size = data.draw(st.integers(0, words * 32))
    bits = [plain.allows(row, token) for token in range(vocab_size)]
    allowed, disallowed = packed.allowed_ids(row, vocab_size), packed.disallowed_ids(row, vocab_size)
    assert allowed.dtype == disallowed.dtype == np.int64
    assert allowed.tolist() == [token for token, bit in enumerate(bits) if bit]
    assert disallowed.tolist() == [token for token, bit in enumerate(bits) if not bit]
    assert packed.unpack(row, vocab_size).tolist() == bits


@given(plain.randoms, st.integers(1, 9), st.integers(1, 12))
def test_equal_rows_have_equal_fingerprints_wherever_they_stand(random, words, count):
    rows = np.ascontiguousarray(random.integers(-2, 3, (count, words), dtype=np.int32))
    numbers = packed.fingerprints(rows)
    assert len(numbers) == count
    assert all(number == int(number) and 0 <= number < 2**64 for number in numbers)
    for i in range(count):
        for j in range(count):
            assert (numbers[i] == numbers[j]) == (rows[i].tolist() == rows[j].tolist())
    backwards = np.ascontiguousarray(rows[::-1])
    assert packed.fingerprints(backwards) == numbers[::-1]


def test_rows_that_differ_in_one_bit_have_other_fingerprints():
    words = 3
    rows = np.zeros((words * 32 + 1, words), dtype=np.int32)
    for token in range(words * 32):
        rows[token + 1] = plain.pack([i == token for i in range(words * 32)])
    assert len(set(packed.fingerprints(rows))) == len(rows)
