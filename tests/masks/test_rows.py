"""The row cache: right rows, an exact account, whole grammars forgotten, and holders that keep working."""

from __future__ import annotations

import gc
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_speedups.masks.rows import _ROW_BYTES, _STATE_BYTES, RowCache, key_bytes

WORDS = 8
ENTRY = WORDS * 4 + _ROW_BYTES + _STATE_BYTES
KEY = key_bytes("a")


def row_of(grammar: int, state: int, words: int = WORDS) -> np.ndarray:
    return np.full(words, 1_000 * grammar + state, dtype=np.int32)


def account(cache: RowCache) -> int:
    for key, grammar in cache._held.items():
        assert grammar.key == key
        distinct = {row.tobytes(): row for row in grammar.rows.values()}
        assert len({id(row) for row in grammar.rows.values()}) == len(distinct) == len(grammar.distinct)
        held = sum(row.nbytes + _ROW_BYTES for row in distinct.values()) + _STATE_BYTES * len(grammar.rows)
        assert grammar.nbytes == key_bytes(key) + held
    return sum(grammar.nbytes for grammar in cache._held.values())


events = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 5), st.sampled_from([1, WORDS, 40]), st.booleans()), max_size=60
)


@given(events, st.integers(0, 8 * ENTRY))
def test_rows_are_those_that_were_put_and_the_budget_holds(events, budget):
    cache, held = RowCache(budget), {}
    for key, state, words, keep in events:
        grammar = held.get(key) or cache.grammar(key)
        if keep:
            held[key] = grammar
        row = grammar.rows.get(state)
        if row is None:
            grammar.put(state, row_of(key, state, words))
        else:
            assert set(row.tolist()) == {1_000 * key + state}
        assert cache.nbytes == account(cache) <= budget
        assert all(grammar.rows == {} and grammar.nbytes == 0 for k, grammar in held.items() if k not in cache._held)
    assert len(cache) == len(cache._held)


def test_a_grammar_is_shared_by_all_who_name_it_alike():
    cache = RowCache(2**20)
    one = cache.grammar(("regex", "a+"))
    assert cache.grammar(("regex", "a+")) is one and cache.grammar(("regex", "b+")) is not one
    one.put(3, row_of(0, 3))
    del one
    gc.collect()
    assert set(cache.grammar(("regex", "a+")).rows) == {3}


def test_a_row_is_copied_when_it_is_put_and_the_first_one_stays():
    grammar, row = RowCache(2**20).grammar("g"), row_of(0, 1)
    grammar.put(1, row)
    row[:] = 9
    grammar.put(1, row)
    assert grammar.rows[1].tolist() == row_of(0, 1).tolist() and grammar.nbytes == KEY + ENTRY


def test_states_with_equal_rows_share_one_and_pay_for_it_once():
    cache = RowCache(2**20)
    grammar, other = cache.grammar("a"), cache.grammar("b")
    for state in range(10):
        grammar.put(state, row_of(0, state % 2))
    other.put(0, row_of(0, 0))
    assert [int(grammar.rows[state][0]) for state in range(10)] == [0, 1] * 5
    assert grammar.rows[0] is grammar.rows[8] and grammar.rows[0] is not other.rows[0]
    assert grammar.nbytes == KEY + 2 * ENTRY + 8 * _STATE_BYTES and cache.nbytes == account(cache)


def test_whole_grammars_are_forgotten_least_recently_used_first():
    cache = RowCache(4 * ENTRY + 3 * KEY)
    a, b, c = (cache.grammar(key) for key in "abc")
    for state in range(2):
        a.put(state, row_of(0, state))
    b.put(0, row_of(1, 0))
    cache.grammar("a")
    c.put(0, row_of(2, 0))
    assert (len(a.rows), len(b.rows), len(c.rows)) == (2, 1, 1)
    c.put(1, row_of(2, 1))
    assert (len(a.rows), len(b.rows), len(c.rows)) == (2, 0, 2)
    assert cache.counters["evictions"] == 1 and cache.nbytes == 4 * ENTRY + 2 * KEY


def test_whoever_holds_a_forgotten_grammar_keeps_working():
    cache = RowCache(2 * ENTRY + KEY)
    a, b = cache.grammar("a"), cache.grammar("b")
    a.put(0, row_of(0, 0))
    seen = a.rows
    b.put(0, row_of(1, 0))
    b.put(1, row_of(1, 1))
    assert a.rows == {} and seen[0].tolist() == row_of(0, 0).tolist()
    a.put(5, row_of(0, 5))
    assert (
        set(a.rows) == {5}
        and cache.grammar("a") is a
        and b.rows == {}
        and cache.nbytes == account(cache) == ENTRY + KEY
    )


def test_a_grammar_larger_than_the_budget_forgets_itself_and_goes_on():
    cache = RowCache(3 * ENTRY + KEY)
    grammar = cache.grammar("a")
    for state in range(50):
        grammar.put(state, row_of(0, state))
        assert cache.nbytes == account(cache) <= 3 * ENTRY + KEY
    assert 0 < cache.counters["evictions"] < 50


def test_a_budget_of_nothing_keeps_nothing():
    for budget in (0, 1, ENTRY + KEY - 1):
        cache = RowCache(budget)
        grammar = cache.grammar("a")
        grammar.put(0, row_of(0, 0))
        assert grammar.rows == {} and cache.nbytes == 0 and len(cache) == 0


def test_the_text_of_a_grammar_counts():
    cache = RowCache(100_000)
    for number in range(50):
        cache.grammar((1, "json", f"{number:10000}")).put(0, row_of(0, 0))
    assert len(cache) == 9 and cache.nbytes == account(cache)
    cache.grammar((1, "json", " " * 200_000)).put(0, row_of(0, 0))
    assert len(cache) == 9


def test_grammars_without_rows_do_not_pile_up():
    cache = RowCache(2**20)
    for key in range(1000):
        cache.grammar(key)
    gc.collect()
    assert len(cache._known) == 0 and len(cache) == 0


def test_threads_never_read_a_wrong_row_and_the_account_stays_exact():
    cache, wrong = RowCache(6 * ENTRY + 2 * KEY), []

    def work(seed):
        random = np.random.default_rng(seed)
        for key, state in random.integers(0, 4, (3_000, 2)).tolist():
            grammar = cache.grammar(key)
            row = grammar.rows.get(state)
            if row is None:
                grammar.put(state, row_of(key, state))
            elif row[0] != 1_000 * key + state or row[-1] != row[0]:
                wrong.append((key, state))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cache.nbytes == account(cache) <= 6 * ENTRY + 2 * KEY
