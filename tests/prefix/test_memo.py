"""The memo finds exactly what was remembered, whatever the order, and stays within its budget."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_speedups.prefix import PrefixMemo
from vllm_speedups.prefix.records import FIRST, pack

from .reference import in_two_threads

BLOCK = 2
KEY = ("test", BLOCK, b"parent", b"tail")


def digests_of(key, tokens) -> list:
    """A stand-in for hashing: what identifies each block with all before it, spelled out."""
    blocks = len(tokens) // BLOCK
    return [repr((key, tokens[: (block + 1) * BLOCK])).encode() for block in range(blocks)]


def lookup(memo, key, tokens) -> list:
    return memo.find(key, pack(tokens), FIRST, BLOCK, len(tokens) // BLOCK)


def learn(memo, key, tokens) -> int:
    return memo.remember(key, pack(tokens), FIRST, BLOCK, digests_of(key, tokens))


def walk(memo):
    pending = [edge for tree in memo._trees.values() for edge in tree.children.values()]
    while pending:
        edge = pending.pop()
        yield edge
        pending += edge.children.values()


def check(memo) -> None:
    """What must hold between calls."""
    order = list(memo._used)
    edges = list(walk(memo))
    assert set(edges) == set(order) and len(edges) == len(order)
    age = {edge: place for place, edge in enumerate(order)}
    for edge in edges:
        assert edge.parent.children[edge.first] is edge
        assert edge.records.startswith(edge.first) and len(edge.records) == len(edge.first) * len(edge.digests)
        assert edge.parent.parent is None or age[edge.parent] > age[edge]
    assert memo.nbytes <= memo.budget or not edges
    if not edges:
        assert memo.nbytes == 0 and not memo._trees


prompts = st.lists(st.integers(0, 1), min_size=0, max_size=24)
keys = st.sampled_from([KEY, (*KEY[:3], b"salt"), (*KEY[:2], b"other", b"tail")])
steps = st.lists(st.tuples(st.booleans(), keys, prompts), max_size=40)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_the_longest_remembered_prefix_is_found(steps):
    memo, known = PrefixMemo(2**30), set()
    for remembers, key, tokens in steps:
        own = digests_of(key, tokens)
        expected = 0
        while expected < len(own) and own[expected] in known:
            expected += 1
        assert lookup(memo, key, tokens) == own[:expected]
        if remembers:
            learn(memo, key, tokens)
            known.update(own)
        check(memo)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 6000))
def test_a_tiny_budget_forgets_but_never_mistakes(steps, budget):
    memo = PrefixMemo(budget)
    for remembers, key, tokens in steps:
        own = digests_of(key, tokens)
        found = lookup(memo, key, tokens)
        assert found == own[: len(found)]
        if remembers:
            learn(memo, key, tokens)
        check(memo)


def test_the_least_recently_used_goes_first():
    memo = PrefixMemo(10_000)
    prompts = [[number] * 20 for number in range(40)]
    for prompt in prompts:
        learn(memo, KEY, prompt)
        assert lookup(memo, KEY, prompts[0]), "what is used again and again stays"
    assert lookup(memo, KEY, prompts[-1]) and not lookup(memo, KEY, prompts[1])


def test_a_shared_prefix_outlives_what_followed_it():
    memo = PrefixMemo(20_000)
    head = list(range(40))
    for number in range(100):
        learn(memo, KEY, head + [number] * 40)
    assert len(lookup(memo, KEY, head)) == 20


def test_what_exceeds_the_budget_is_remembered_as_far_as_it_fits():
    memo = PrefixMemo(20_000)
    tokens = list(range(1000))
    learn(memo, KEY, tokens)
    found = lookup(memo, KEY, tokens)
    assert found == digests_of(KEY, tokens)[: len(found)] and len(found) > 150
    check(memo)


def test_blocks_behind_the_run_are_not_matched():
    memo = PrefixMemo(2**20)
    tokens = list(range(40))
    learn(memo, KEY, tokens)
    assert len(memo.find(KEY, pack(tokens), FIRST, BLOCK, 7)) == 7


def test_the_budget_is_what_memory_measures():
    memo = PrefixMemo(2**40)
    prompts = [[number] * 16 + list(range(number, number + 4096)) for number in range(0, 40_000, 700)]
    streams = [(pack(prompt), len(prompt) // 16) for prompt in prompts]
    del prompts
    tracemalloc.start()
    try:
        for data, blocks in streams:
            memo.remember(KEY, data, FIRST, 16, [bytes(bytearray(32)) for _ in range(blocks)])
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 < memo.nbytes / measured < 1.2


def test_the_budget_covers_short_prompts_too():
    memo = PrefixMemo(2**40)
    streams = [pack([number] * 16 + list(range(16))) for number in range(3000)]
    tracemalloc.start()
    try:
        for data in streams:
            memo.remember(KEY, data, FIRST, 16, [bytes(bytearray(32)) for _ in range(2)])
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 < memo.nbytes / measured < 1.3


def test_two_threads_find_only_what_is_true():
    memo, wrong = PrefixMemo(30_000), []

    def work(seed):
        for turn in range(1500):
            tokens = [(seed + turn) % 3] * (turn % 30) + [turn % 5] * (turn % 41)
            found = lookup(memo, KEY, tokens)
            own = digests_of(KEY, tokens)
            if found != own[: len(found)]:
                wrong.append(tokens)
            memo.remember(KEY, pack(tokens), FIRST, BLOCK, own)

    in_two_threads(work)
    assert not wrong
    check(memo)


def test_the_tree_is_never_touched_without_the_lock():
    memo = PrefixMemo(3000)

    class Used(type(memo._used)):
        def __setitem__(self, *entry):
            assert memo._lock.locked()
            super().__setitem__(*entry)

        def move_to_end(self, *arguments, **more):
            assert memo._lock.locked()
            super().move_to_end(*arguments, **more)

        def popitem(self, *arguments, **more):
            assert memo._lock.locked()
            return super().popitem(*arguments, **more)

    class Trees(dict):
        def get(self, *arguments):
            assert memo._lock.locked()
            return super().get(*arguments)

    memo._used, memo._trees = Used(), Trees()
    for number in range(40):
        tokens = [1] * number + [number] * 20
        memo.remember(KEY, pack(tokens), FIRST, BLOCK, digests_of(KEY, tokens))
        found = lookup(memo, KEY, tokens)
        assert found and found == digests_of(KEY, tokens)[: len(found)]
