"""Histories, the account of a grammar, and requests that follow a matcher through all that can happen to it."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_speedups.masks import tracking
from vllm_speedups.masks.history import History
from vllm_speedups.masks.rows import RowCache
from vllm_speedups.masks.serialized import Unnumbered, Unsupported
from vllm_speedups.masks.tracking import EXPENSIVE, Request, Tracker
from vllm_speedups.masks.trail import Trail
from vllm_speedups.masks.worth import ALLOWANCE, FIRST_PAUSE, WINDOW, Worth


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=30))
def test_equal_histories_have_equal_ids_and_no_others(paths):
    history, seen = History(), {}
    for path in paths:
        trail = Trail(history.initial, history.follow, path)
        trail.place()
        for length, node in enumerate(trail.places):
            assert seen.setdefault(tuple(path[:length]), node.number) == node.number
    assert len(set(seen.values())) == len(seen)


@given(
    st.lists(
        st.one_of(st.integers(0, 2), st.tuples(st.just("back"), st.integers(1, 4)), st.just("reset"), st.just("ask"))
    )
)
def test_a_trail_is_where_its_tokens_lead_whatever_was_undone(events):
    history, tokens = History(), []
    trail = Trail(history.initial, history.follow)
    for event in events:
        if event == "ask":
            trail.place()
        elif event == "reset":
            trail.reset()
            tokens = []
        elif isinstance(event, tuple):
            trail.rollback(event[1])
            tokens = tokens[: max(len(tokens) - event[1], 0)]
        else:
            trail.accept([event])
            tokens.append(event)
    assert trail.tokens == tokens
    assert trail.place() is Trail(history.initial, history.follow, tokens).place()


def test_a_trail_that_is_far_behind_catches_up_in_strides():
    history = History()
    trail = Trail(history.initial, history.follow, range(20))
    assert [trail.place(8), trail.place(8), len(trail.places)] == [None, None, 17]
    assert trail.place(8) is Trail(history.initial, history.follow, range(20)).place()


def test_a_trie_is_begun_anew_past_its_limit():
    history = History(limit=10)
    first = history.initial
    trail = Trail(first, history.follow, range(25))
    trail.place()
    assert len(history) <= 10 and history.initial is not first
    assert len({node.number for node in trail.places}) == 26


def test_walking_that_never_pays_pauses_and_is_tried_again_ever_more_seldom():
    worth, walked, pauses = Worth(), 0.0, []
    for _ in range(3):
        while worth.walking:
            walked += 320e-6
            worth.miss(320e-6, 9e-6)
        idle = 0
        while not worth.walking:
            worth.idle()
            idle += 1
        pauses.append(idle)
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert walked < 3 * (ALLOWANCE + 2 * WINDOW * 320e-6)


def test_walking_that_is_dear_at_first_and_saves_more_goes_on():
    worth = Worth()
    for _ in range(2000):
        assert worth.miss(400e-6, 2e-3)
        worth.hit(10e-6)
    for _ in range(1000):
        worth.hit(2e-3)
    assert worth.balance > 0


def test_one_long_walk_for_one_row_is_no_verdict():
    worth = Worth()
    assert worth.miss(0.2, 1e-3)
    for _ in range(100):
        worth.hit(1e-3)
        assert worth.miss(1e-5, 1e-3)


def request_without_automaton(budget=2**20):
    tracker = Tracker(RowCache(budget), budget, Counter())
    grammar = tracker.grammar("g")
    return tracker, grammar, Request(tracker, grammar)


def test_only_expensive_rows_are_remembered_and_nothing_before_one_was():
    _, grammar, request = request_without_automaton()
    row = np.arange(4, dtype=np.int32)
    assert request.look_up() is None
    request.filled(row, EXPENSIVE / 2)
    assert request.look_up() is None and grammar.history is None
    request.filled(row, EXPENSIVE * 2)
    assert request.look_up() is None and grammar.history is not None
    request.filled(row, EXPENSIVE / 2)
    assert request.look_up() is None
    request.filled(row, EXPENSIVE * 2)
    assert np.array_equal(request.look_up(), row)
    request.trail.accept([5])
    assert request.look_up() is None
    request.trail.rollback(1)
    assert np.array_equal(request.look_up(), row)


def test_tries_count_although_no_row_is_worth_keeping():
    tracker, grammar, request = request_without_automaton()
    grammar.dear = True
    before = tracker.nbytes
    for step in range(10 * tracking.ACCOUNT_EVERY):
        request.look_up()
        request.filled(np.zeros(2, np.int32), EXPENSIVE / 2)
        request.trail.accept([step])
    assert tracker.nbytes - before >= 400 * 9 * tracking.ACCOUNT_EVERY


class _Stuck:
    """Sources of networks, of which the first does not end before it is told to."""

    def __init__(self):
        self.begun, self.may_end, self.asked = threading.Event(), threading.Event(), []

    def __call__(self):
        self.asked.append(1)
        self.begun.set()
        self.may_end.wait(60)
        raise Unsupported("a test")


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_only_a_few_networks_wait_to_be_built_and_the_others_ask_again():
    tracker, source = Tracker(RowCache(2**20), 2**20, Counter()), _Stuck()
    grammars = [tracker.grammar(number) for number in range(tracking.MAX_WAITING + 3)]
    tracker.request_build(grammars[0], source)
    source.begun.wait(60)
    for grammar in grammars[1:]:
        grammar.fill_s = 1.0
        tracker.request_build(grammar, source)
    assert [grammar.fill_s for grammar in grammars[-2:]] == [0.0, 0.0]
    assert all(grammar.fill_s == float("-inf") for grammar in grammars[:-2])
    source.may_end.set()
    wait_until(lambda: len(source.asked) == len(grammars) - 2)
    tracker.request_build(grammars[-1], source)
    wait_until(lambda: grammars[-1].reason)


def test_building_waits_until_time_or_savings_pay_for_it():
    tracker, source = Tracker(RowCache(2**20), 2**20, Counter()), _Stuck()
    source.may_end.set()
    tracker._builds.allows(time.process_time())
    tracker._builds.spend(1e6)
    tracker.request_build(tracker.grammar("g"), source)
    time.sleep(0.1)
    assert not source.asked
    tracker.saved = 2e7
    wait_until(lambda: source.asked)


def test_histories_are_forgotten_least_recently_used_first():
    tracker, _, _ = request_without_automaton(budget=100_000)
    for key in range(40):
        request = Request(tracker, tracker.grammar(key))
        request.grammar.dear = True
        for step in range(tracking.ACCOUNT_EVERY):
            request.look_up()
            request.filled(np.zeros(2, np.int32), 1.0)
            request.trail.accept([step])
    assert tracker.nbytes <= tracker.budget
    assert tracker.counters["networks forgotten"] > 0


def declined(error: Exception) -> Request:
    """A request of a grammar whose network could not be built, after an expensive fill."""
    tracker, grammar, _ = request_without_automaton()

    def source():
        raise error

    request = Request(tracker, grammar, source)
    assert request.look_up() is None
    tracker.build(grammar, source)
    assert grammar.reason and grammar.network is None
    request.filled(np.zeros(2, np.int32), 1.0)
    assert request.look_up() is None
    request.filled(np.ones(2, np.int32), 1.0)
    return request


def test_a_grammar_whose_states_cannot_be_numbered_falls_back_on_the_history():
    assert np.array_equal(declined(Unnumbered("it is left-recursive")).look_up(), np.ones(2, np.int32))


@pytest.mark.parametrize("error", [Unsupported("a rule has a budget"), RuntimeError("no text")])
def test_a_grammar_that_may_not_be_pure_is_filled_every_time(error):
    request = declined(error)
    assert request.look_up() is None and request.grammar.history is None


def test_a_source_that_raises_is_a_declined_grammar():
    tracker, grammar, _ = request_without_automaton()

    def source():
        raise RuntimeError("no text")

    tracker.build(grammar, source)
    assert "RuntimeError" in grammar.reason
