"""Hashes of prefixes are those that Python computes, also where its accumulator cannot be told from the hash."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vllm_speedups.prefix import tuple_hash
from vllm_speedups.prefix.prompt_hashes import PromptHashes

items = st.one_of(st.integers(-(2**70), 2**70), st.booleans(), st.text(max_size=3), st.none(), st.floats())
tuples = st.lists(items, max_size=40).map(tuple)
long = st.builds(lambda some, times: tuple(some) * times, st.lists(items, min_size=1, max_size=9), st.integers(1, 400))


@hypothesis_settings(max_examples=300, deadline=None)
@given(tuples | long, st.integers(1, 40))
def test_every_prefix_has_the_hash_that_python_gives_it(whole, step):
    expected = [hash(whole[:end]) for end in range(step, len(whole) + 1, step)]
    assert tuple_hash.prefix_hashes(whole, step) == expected


@hypothesis_settings(max_examples=300, deadline=None)
@given(tuples | long, tuples)
def test_a_prefix_is_extended(known, rest):
    assert tuple_hash.extended(hash(known), len(known), rest) == hash(known + rest)


@hypothesis_settings(max_examples=300, deadline=None)
@given(tuples | long, st.integers(1, 40), items, items)
def test_prefixes_are_paired_as_in_a_tuple(whole, step, other, another):
    prefixes = [whole[:end] for end in range(step, len(whole) + 1, step)]
    assert tuple_hash.prefix_hashes(whole, step, other) == [hash((prefix, other)) for prefix in prefixes]
    expected = [hash(((prefix, other), another)) for prefix in prefixes]
    assert tuple_hash.prefix_hashes(whole, step, other, another) == expected


def test_what_stands_for_a_tuple_has_its_hash():
    inner = (1, (2, 3))
    assert hash((tuple_hash.standing_for(hash(inner)), 5)) == hash((inner, 5))


def ending_at(accumulator: int, before: tuple):
    """An item that brings a tuple's accumulator, behind `before`, to this value. By the definition in CPython's source."""
    mask, one, two, five = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    state = five
    for item in before:
        state = state + hash(item) * two & mask
        state = (state << 31 | state >> 33) * one & mask
    turned = accumulator * pow(one, -1, 2**64) & mask
    lane = (((turned >> 31 | turned << 33) & mask) - state) * pow(two, -1, 2**64) & mask
    return tuple_hash.standing_for(lane if lane < 2**63 else lane - 2**64)


def plus_length(count: int) -> int:
    return count ^ 2870177450012600261 ^ 3527539


@pytest.mark.parametrize("others", [3, 3000])
def test_a_hash_that_would_be_minus_one_is_followed_exactly(others):
    before = (5, 6, 7)
    last = ending_at(-1 - plus_length(4) & 2**64 - 1, before)
    whole = (*before, last, *range(others))
    assert hash(whole[:4]) == 1546275796, "not the case that is meant"
    assert tuple_hash.prefix_hashes(whole, 4) == [hash(whole[:end]) for end in range(4, len(whole) + 1, 4)]
    assert tuple_hash.extended(hash(whole[:4]), 4, (1,)) is None
    flat = PromptHashes(whole[:4], 4, 0, flat=True)
    assert flat.past_the_prompt(1, [8, 9]) == hash(((*whole[:4], 8, 9), 0))


@pytest.mark.parametrize("others", [0, 3000])
def test_a_block_that_hashes_to_what_minus_one_is_replaced_by(others):
    """The prefix behind the first block is one block of an item and the block's tokens: one item longer."""
    whole = (*range(3), ending_at(-1 - plus_length(5) & 2**64 - 1, (0, 1, 2)), *range(others))
    assert tuple_hash.prefix_hashes(whole, 4) == [hash(whole[:end]) for end in range(4, len(whole) + 1, 4)]


@pytest.mark.parametrize("others", [4, 3000])
def test_an_item_that_would_have_to_hash_to_minus_one(others):
    mask, one, two, five = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    state = five - two & mask
    state = (state << 31 | state >> 33) * one & mask
    whole = (*range(3), ending_at(state, (0, 1, 2)), *range(others))
    assert tuple_hash.prefix_hashes(whole, 4) == [hash(whole[:end]) for end in range(4, len(whole) + 1, 4)]
    assert tuple_hash.extended(hash(whole[:4]), 4, (1,)) in (None, hash((*whole[:4], 1)))


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 900) | st.just(9000), st.lists(st.integers(0, 99), max_size=80), st.sampled_from((1, 8, 16)),
    st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_blocks_are_hashed_with_all_before_them(length, output, block_size, adapter, flat):
    prompt = tuple(position * 7919 % 50_021 for position in range(length))
    hashes = PromptHashes(prompt, block_size, adapter, flat)
    assert len(hashes.values) == length // block_size
    for block in range((length + len(output)) // block_size + 2):
        end = (block + 1) * block_size
        if flat:
            expected = hash(((prompt + tuple(output))[:end], adapter))
        elif end > length:
            expected = hash(((prompt, tuple(output[: end - length])), adapter))
        else:
            expected = hash(((prompt[:end], None), adapter))
        known = hashes.values[block] if block < len(hashes.values) else hashes.past_the_prompt(block, output)
        assert known == expected


def test_this_python_is_known():
    assert tuple_hash.exact()


@pytest.mark.parametrize("step", [0, -1])
def test_there_are_no_steps_below_one(step):
    with pytest.raises(ValueError, match="step"):
        tuple_hash.prefix_hashes(tuple(range(1000)), step)
