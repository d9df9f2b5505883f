"""The state cache: what it remembers, shares and forgets."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from vllm_speedups.masks.states import _ENTRY_BYTES, _GUIDE_BYTES, StateCache


def bias(key: str, nbytes: int = 1000) -> SimpleNamespace:
    return SimpleNamespace(key=key.encode(), nbytes=nbytes)


def known(cache: StateCache, guide, kind=1) -> dict:
    states = cache.states(guide, kind)
    return states.biases if states is not None else {}


def test_states_are_those_of_their_guide_and_kind():
    cache = StateCache(10**6)
    first, second = bias("a"), bias("b")
    cache.put("guide", 1, 0, first)
    cache.put("guide", 2, 0, second)
    cache.put("other", 1, 0, second)
    assert known(cache, "guide") == {0: first} and known(cache, "guide", 2) == {0: second}
    assert known(cache, "other") == {0: second} and not known(cache, "none")


def test_equal_biases_of_one_kind_are_one_and_count_once():
    cache = StateCache(10**6)
    first = cache.put("guide", 1, 0, bias("a"))
    assert cache.put("guide", 1, 1, bias("a")) is first and cache.put("other", 1, 7, bias("a")) is first
    assert cache.put("guide", 2, 0, bias("a")) is not first
    assert cache.nbytes == 2 * 1000 + 4 * _ENTRY_BYTES + 3 * _GUIDE_BYTES


def test_the_least_recently_used_guide_is_forgotten_first():
    cache = StateCache(2 * (1000 + _ENTRY_BYTES + _GUIDE_BYTES))
    cache.put("a", 1, 0, bias("a"))
    cache.put("b", 1, 0, bias("b"))
    held = cache.states("b", 1)
    cache.used("a", 1)
    cache.put("c", 1, 0, bias("c"))
    assert known(cache, "a") and not known(cache, "b") and known(cache, "c")
    assert not held.biases and cache.counters["guides forgotten"] == 1 and cache.nbytes <= cache.budget


def test_a_shared_bias_is_freed_with_the_last_guide_that_uses_it():
    cache = StateCache(1000 + 2 * (_ENTRY_BYTES + _GUIDE_BYTES))
    cache.put("a", 1, 0, bias("x"))
    cache.put("b", 1, 0, bias("x"))
    cache.put("c", 1, 0, bias("x"))
    assert len(cache) == 2 and cache.nbytes == 1000 + 2 * (_ENTRY_BYTES + _GUIDE_BYTES)
    cache.put("d", 1, 0, bias("y"))
    assert len(cache) == 1 and cache.nbytes == 1000 + _ENTRY_BYTES + _GUIDE_BYTES


def test_what_is_larger_than_the_budget_is_not_kept():
    cache = StateCache(0)
    one = bias("a")
    assert cache.put("guide", 1, 0, one) is one and not cache.nbytes and not len(cache)


def test_threads_that_put_at_once_keep_the_account():
    cache = StateCache(20 * (1000 + _ENTRY_BYTES))

    def work(number: int) -> None:
        for step in range(400):
            cache.put(f"guide{(number + step) % 7}", step % 2, step % 11, bias(str(step % 13)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared = cache._biases.values()
    entries = sum(len(states.biases) for states in cache._held.values())
    own = entries * _ENTRY_BYTES + len(cache) * _GUIDE_BYTES
    assert cache.nbytes == own + sum(one.nbytes for one, _ in shared) <= cache.budget
    used = sum(len(states.owned) for states in cache._held.values())
    assert used == sum(count for _, count in shared)
