"""The hasher's digests are those of the plain reference, whatever way they were come by."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_speedups.prefix import PrefixHasher, PrefixMemo, find
from vllm_speedups.prefix import hasher as module

from . import reference
from .reference import in_two_threads
from .strategies import block_sizes, extra_keys, token_ids, twins

EAGER = {"_MEMO_TOKENS": 8, "_BULK_TOKENS": 12, "_CHUNK_TOKENS": 40}


def make(name, block_size, budget=2**24):
    return PrefixHasher(find(name), block_size, PrefixMemo(budget), defaultdict(int))


@pytest.fixture
def eager(monkeypatch):
    """Short runs are already worth remembering, somewhat longer ones laying out."""
    for constant, tokens in EAGER.items():
        monkeypatch.setattr(module, constant, tokens)


@st.composite
def requests(draw, block_size):
    """(tokens, start, runs): a prefix of few distinct shapes, so that prefixes are shared, cut into runs at will."""
    runs = draw(st.lists(st.tuples(st.integers(1, 9), extra_keys | twins()), min_size=1, max_size=4))
    start = draw(st.integers(0, 2))
    cycle = draw(st.lists(token_ids, min_size=1, max_size=3)) * 5
    total = (start + sum(blocks for blocks, _ in runs)) * block_size
    tokens = (cycle * (total // len(cycle) + 1))[: total + draw(st.integers(0, block_size - 1))]
    return tokens, start * block_size, runs


@pytest.mark.parametrize("name", reference.NAMES)
@settings(max_examples=50, deadline=None)
@given(block_size=block_sizes, budget=st.sampled_from([0, 3000, 20_000, 2**24]), data=st.data())
def test_digests_are_those_of_the_reference(name, block_size, budget, data):
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in EAGER.items():
            patch.setattr(module, constant, value)
        hasher = make(name, block_size, budget)
        parents = [bytes([number]) * hasher.algorithm.digest_size for number in range(2)]
        drawn = data.draw(st.lists(requests(block_size), min_size=1, max_size=3))
        for tokens, start, runs in [*drawn, *drawn]:
            for parent in parents:
                expected = reference.chain(name, block_size, tokens, start, runs, parent)
                assert hasher.extend(tokens, start, runs, parent) == expected


@pytest.mark.parametrize("name", reference.NAMES)
def test_a_long_prompt_comes_out_right_new_and_known_and_grown(name):
    rng = random.Random(3)
    tokens = [rng.randrange(152_000) for _ in range(20_000)]
    hasher, parent = make(name, 16), bytes(find(name).digest_size)
    expected = reference.chain(name, 16, tokens, 0, [(1250, None)], parent)
    assert hasher.extend(tokens[:16_000], 0, [(1000, None)], parent) == expected[:1000]
    assert hasher.counts["hits"] == 0
    assert hasher.extend(list(tokens), 0, [(1250, None)], parent) == expected
    assert hasher.counts["hits"] == 1000
    assert hasher.extend(tokens, 0, [(1250, None)], parent) == expected
    assert hasher.counts == {"hits": 2250, "misses": 1250}


@pytest.mark.parametrize("name", reference.NAMES)
def test_nothing_is_shared_across_extra_keys_parents_sizes_or_algorithms(name, eager):
    memo, counts = PrefixMemo(2**24), defaultdict(int)
    same = str(12345)
    other = "".join(["123", "45"])
    keys = [None, ("a",), ("b",), (("lora", "a", "a"),), (b"a",), (same, same), (same, other), (1,), (True,), (1.0,)]
    tokens = list(range(160))
    for block_size in (4, 8):
        for algorithm in (find(name), find("sha256"), find("xxhash_cbor")):
            for parent in (b"\x00" * algorithm.digest_size, b"\x01" * algorithm.digest_size):
                for extra in keys:
                    runs = [(160 // block_size, extra)]
                    got = PrefixHasher(algorithm, block_size, memo, counts).extend(tokens, 0, runs, parent)
                    assert got == reference.chain(algorithm.name, block_size, tokens, 0, runs, parent)


class _Id(int):
    pass


@pytest.mark.parametrize("name", ["sha256", "xxhash"])
@pytest.mark.parametrize("odd", [True, _Id(1), 2**31, 2**63, -1])
def test_tokens_that_are_not_plain_ints_are_hashed_as_what_they_are(name, odd, eager):
    for place in (0, 5, 31, 32, 95):
        hasher, parent = make(name, 8), bytes(find(name).digest_size)
        plain = [1] * 96
        strange = [*plain[:place], odd, *plain[place + 1 :]]
        for tokens in (plain, strange, plain, strange):
            for runs in ([(12, None)], [(1, ("salt",)), (11, None)]):
                expected = reference.chain(name, 8, tokens, 0, runs, parent)
                assert hasher.extend(tokens, 0, runs, parent) == expected


# True is four bytes shorter than a record, 2**31 six longer and 2**46 eight: together they leave the length as it was.
EVEN = [True, 2**31, True, 2**31, True]


@pytest.mark.parametrize("name", ["sha256", "xxhash"])
def test_odd_tokens_that_leave_the_packed_length_as_it_was_are_noticed(name, eager):
    for place in (0, 6, 30, 91):
        hasher, parent = make(name, 8), bytes(find(name).digest_size)
        plain = list(range(96))
        strange = [*plain[:place], *EVEN, *plain[place + len(EVEN) :]]
        for tokens in (strange, plain, strange):
            for runs in ([(12, None)], [(1, ("salt",)), (11, None)]):
                assert hasher.extend(tokens, 0, runs, parent) == reference.chain(name, 8, tokens, 0, runs, parent)


def test_odd_tokens_before_a_run_do_not_shift_what_it_is_compared_with(eager):
    hasher, parent = make("sha256", 8), bytes(32)
    known = list(range(100, 116))
    prefix = [True] * 5 + [1] * 3
    hasher.extend(prefix + known, 8, [(2, None)], parent)
    # Five times four bytes less put the known records, four tokens further on, where the run's own ought to be.
    tokens = [*prefix, 1, 2, 3, 4, *known, *range(96), 2**31, 2**31, 2**46, 0]
    runs = [(len(tokens) // 8 - 1, None)]
    assert hasher.extend(tokens, 8, runs, parent) == reference.chain("sha256", 8, tokens, 8, runs, parent)


@pytest.mark.parametrize("length", [10, 199, 1000, 5000])
def test_extra_keys_of_any_length(length, eager):
    tokens, keys = list(range(160)), ("x" * length,)
    hasher, runs = make("sha256", 8), [(20, keys)]
    for _ in range(2):
        expected = reference.chain("sha256", 8, tokens, 0, runs, bytes(32))
        assert hasher.extend(tokens, 0, runs, bytes(32)) == expected
    assert hasher.counts["hits"] == 20


def test_two_threads_sharing_one_memo_agree_with_the_reference(eager):
    memo, wrong = PrefixMemo(40_000), []
    parent = bytes(32)

    def work(seed):
        rng = random.Random(seed)
        hasher = PrefixHasher(find("sha256"), 4, memo, defaultdict(int))
        for _ in range(400):
            tokens = [rng.randrange(2)] * rng.randrange(4, 90) + [rng.randrange(3)] * 40
            runs = [(len(tokens) // 4, rng.choice([None, ("salt",)]))]
            if hasher.extend(tokens, 0, runs, parent) != reference.chain("sha256", 4, tokens, 0, runs, parent):
                wrong.append(tokens)

    in_two_threads(work)
    assert not wrong


@pytest.mark.parametrize("name", reference.NAMES)
def test_a_first_parent_of_another_size_is_chained_to_as_it_is(name, eager):
    tokens, parent = list(range(160)), b"twenty bytes of seed"
    assert make(name, 8).extend(tokens, 0, [(20, None)], parent) == reference.chain(
        name, 8, tokens, 0, [(20, None)], parent
    )


def test_a_marshal_that_writes_otherwise_costs_speed_only(monkeypatch, eager):
    monkeypatch.setattr(module, "works", lambda: False)
    hasher = make("sha256", 4)
    tokens = list(range(80))
    assert hasher.extend(tokens, 0, [(20, None)], bytes(32)) == reference.chain(
        "sha256", 4, tokens, 0, [(20, None)], bytes(32)
    )
    assert not len(hasher.memo)


def test_unknown_algorithms_are_not_found():
    assert find("md5") is None and find("builtin") is None
