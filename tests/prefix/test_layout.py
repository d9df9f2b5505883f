"""Bodies laid out in bulk are the bytes that pickle and CBOR write block by block."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_speedups.prefix import find
from vllm_speedups.prefix.layout import layout
from vllm_speedups.prefix.records import BYTES, FIRST, intact, pack, shared, values

from . import reference
from .strategies import EDGES, block_sizes, extra_keys, token_ids, twins


@pytest.mark.parametrize("name", reference.NAMES)
@settings(max_examples=80, deadline=None)
@given(block_size=block_sizes, keys=extra_keys | twins(), data=st.data())
def test_messages_are_the_bytes_written_one_by_one(name, block_size, keys, data):
    blocks = data.draw(st.integers(1, 6))
    cycle = data.draw(st.lists(token_ids, min_size=1, max_size=40))
    tokens = (cycle * (blocks * block_size // len(cycle) + 1))[: blocks * block_size]
    algorithm = find(name)
    shape = layout(algorithm, block_size, keys)
    if reference.message(name, b"", (), keys).endswith(b"\0"):
        assert shape is None
        return
    bodies = shape.bodies(pack(tokens), FIRST, blocks)
    assert len(bodies) == blocks
    parent = bytes(range(algorithm.digest_size))
    for block, body in enumerate(bodies):
        block_tokens = tuple(tokens[block * block_size : (block + 1) * block_size])
        assert shape.heads[len(body)] + parent + body == reference.message(name, parent, block_tokens, keys)


@pytest.mark.parametrize("name", reference.NAMES)
def test_tokens_at_every_width_meet_every_other(name):
    tokens = [token for one in EDGES for other in EDGES for token in (one, other)]
    algorithm = find(name)
    shape = layout(algorithm, len(tokens), None)
    (body,) = shape.bodies(pack(tokens), FIRST, 1)
    parent = bytes(algorithm.digest_size)
    assert shape.heads[len(body)] + parent + body == reference.message(name, parent, tuple(tokens), None)


def test_negative_ids_are_laid_out_for_pickle_and_declined_for_cbor():
    tokens = [-1, 5, -(2**31), 70_000]
    (body,) = layout(find("sha256"), 4, None).bodies(pack(tokens), FIRST, 1)
    assert body in reference.message("sha256", bytes(32), tuple(tokens), None)
    assert layout(find("sha256_cbor"), 4, None).bodies(pack(tokens), FIRST, 1) is None


def test_blocks_that_pickle_would_split_into_frames_have_no_layout():
    for name in reference.NAMES:
        assert layout(find(name), 11_000, None) is None
        assert layout(find(name), 16, ("salt" * 20_000,)) is None


def test_messages_that_end_in_a_zero_have_no_layout():
    assert layout(find("sha256_cbor"), 16, ("a", 0)) is None
    assert layout(find("sha256_cbor"), 16, (0, "a")) is not None


def test_an_encoder_that_writes_otherwise_has_no_layout():
    for name in reference.NAMES:
        algorithm = find(name)
        other = algorithm._replace(encode=lambda value, encode=algorithm.encode: b"?" + encode(value))
        assert layout(other, 4, None) is None


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1), st.data())
def test_records_hold_the_tokens(tokens, data):
    packed = pack(tokens)
    first = data.draw(st.integers(0, len(tokens) - 1))
    begin = FIRST + BYTES * first
    assert intact(packed, FIRST, len(packed))
    assert values(packed, begin, len(tokens) - first).tolist() == [token % 2**32 for token in tokens[first:]]


class _Whole(int):
    pass


@pytest.mark.parametrize("odd", [True, 2**31, -(2**31) - 1, 1.0, None, "1", _Whole(1), 2**70])
@settings(max_examples=30, deadline=None)
@given(before=st.lists(token_ids, max_size=6), after=st.lists(token_ids, max_size=6))
def test_records_of_anything_but_plain_ints_are_told_apart(odd, before, after):
    tokens = [*before, odd, *after]
    packed = pack(tokens)
    assert packed is None or not intact(packed, FIRST, len(packed))


def test_odd_elements_whose_sizes_even_out_are_told_apart():
    # True takes one byte less than a record by four, and 2**31 takes nine more than four: two bytes too many together.
    for tokens in ([True, True, True, 2**31 * 5], [1, True, "abc"], [None, 2.5], [True, True, (1, 2)]):
        packed = pack(tokens)
        assert packed is None or not intact(packed, FIRST, len(packed))


@example(one=b"abc", other=b"xabc", begin=1)
@given(one=st.binary(max_size=20), other=st.binary(max_size=20), begin=st.integers(0, 5))
def test_shared_counts_leading_bytes(one, other, begin):
    begin = min(begin, len(other))
    expected = 0
    for left, right in zip(one, other[begin:]):
        if left != right:
            break
        expected += 1
    assert shared(one, other, begin) == expected
