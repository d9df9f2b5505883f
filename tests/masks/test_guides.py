"""Compiled guides: compiled once, within a budget, and what their sizes are estimated at."""

from __future__ import annotations

import threading

import pytest

from vllm_speedups.masks.guides import _GUIDE_BYTES, GuideCache, index_bytes, table_bytes


class Guide:
    def __init__(self, size: int = 10):
        self.size = size


def cache_of(budget: int) -> GuideCache:
    return GuideCache(budget, lambda guide: guide.size)


def test_a_guide_is_made_once_for_a_key():
    cache, made = cache_of(100), []
    get = [cache.get(key, lambda: made.append(1) or Guide()) for key in ("a", "b", "a")]
    assert get[0] is get[2] and get[0] is not get[1] and len(made) == 2
    assert cache.counters == {"compiled": 2, "guides shared": 1}


def test_the_least_recently_used_is_forgotten_once_nobody_holds_it():
    budget = 2 * (10 + len("a") + _GUIDE_BYTES)
    cache = cache_of(budget)
    for key in ("a", "b", "a", "c"):
        cache.get(key, Guide)
    fresh = Guide()
    assert cache.get("a", lambda: fresh) is not fresh and cache.get("b", lambda: fresh) is fresh
    assert cache.nbytes <= budget


def test_the_text_of_a_specification_counts_and_so_does_a_guide_of_few_states():
    cache = cache_of(10**6)
    for number in range(1000):
        cache.get(("class", f"{number:2000}", None), lambda: Guide(0))
    assert len(cache) < 10**6 // (2000 + _GUIDE_BYTES) + 1 and cache.nbytes <= 10**6


def test_a_guide_in_use_is_shared_past_the_budget():
    cache = cache_of(5)
    held = cache.get("a", Guide)
    assert cache.get("a", Guide) is held and not len(cache)


def test_a_budget_of_nothing_shares_nothing():
    cache = cache_of(0)
    assert cache.get("a", Guide) is not cache.get("a", Guide)


def test_errors_are_raised_and_not_remembered():
    cache = cache_of(100)

    def fails():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            cache.get("a", fails)
    assert isinstance(cache.get("a", Guide), Guide)


def test_one_thread_compiles_while_others_wait():
    cache, started, go, got, made = cache_of(100), threading.Event(), threading.Event(), [], []

    def slow():
        made.append(1)
        started.set()
        go.wait(10)
        return Guide()

    threads = [threading.Thread(target=lambda: got.append(cache.get("a", slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait(10)
    other = cache.get("b", Guide)
    go.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(set(map(id, got))) == 1 and isinstance(other, Guide)


def test_threads_that_waited_for_a_failure_compile_for_themselves():
    cache, started, go, raised = cache_of(100), threading.Event(), threading.Event(), []

    def fails():
        started.set()
        go.wait(10)
        raise ValueError("no")

    def ask():
        try:
            cache.get("a", fails)
        except ValueError as error:
            raised.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(10)
    go.set()
    for thread in threads:
        thread.join()
    assert len(raised) == 3 and len(set(map(id, raised))) == 3


def test_sizes_grow_with_the_transitions():
    small, large = ({state: dict.fromkeys(range(count)) for state in range(10)} for count in (10, 1000))
    assert 20 < table_bytes(large) / table_bytes(small) < 200
    tables = {state: dict.fromkeys(range(200), (state + 1) % 50) for state in range(50)}
    estimate = index_bytes(0, lambda state: list(tables[state]), lambda state, token: tables[state].get(token))
    assert 0.5 < estimate / (50 * 200 * 13) < 2


def test_a_dead_end_has_a_size_too():
    assert index_bytes(0, lambda state: None, lambda state, token: None) == 0
