"""The referee's judgement: lost tests, flaky ones, and outcomes that prove nothing."""

from __future__ import annotations

import json

import outcomes
import pytest


def notes(tmp_path, *lines) -> dict:
    file = tmp_path / "outcomes.jsonl"
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return outcomes.read(file)


def note(test: str, when: str, outcome: str) -> dict:
    return {"test": test, "when": when, "outcome": outcome, "reason": ""}


def process(pytest_=True, counters=None, **patches) -> dict:
    """A record of the witness: patches as name=(status, reason, failures)."""
    patches = {name: list(state) for name, state in patches.items()}
    return {"process": "MainProcess", "pytest": pytest_, "patches": patches, "counters": counters or {}}


APPLIED = ("applied", "", 0)
WORKED = {"a": {"hits": 3}}


@pytest.mark.parametrize(
    ("phases", "outcome"),
    [
        ({"setup": "passed", "call": "passed", "teardown": "passed"}, "passed"),
        ({"setup": "passed", "call": "failed", "teardown": "passed"}, "failed"),
        ({"setup": "failed", "teardown": "passed"}, "error"),
        ({"setup": "passed", "call": "passed", "teardown": "failed"}, "error"),
        ({"setup": "skipped", "teardown": "passed"}, "skipped"),
        ({"setup": "passed", "call": "xfailed", "teardown": "passed"}, "xfailed"),
        ({"collect": "failed"}, "error"),
    ],
)
def test_a_test_is_what_its_worst_phase_is(tmp_path, phases, outcome):
    assert notes(tmp_path, *(note("t", when, how) for when, how in phases.items())) == {"t": outcome}


def test_one_failed_subtest_is_a_failed_test(tmp_path):
    lines = [note("t", "call", how) for how in ("passed", "failed", "passed")]
    assert notes(tmp_path, *lines) == {"t": "failed"}


def test_what_a_crash_cut_off_is_left_out(tmp_path):
    assert notes(tmp_path, note("t", "call", "passed"), '{"test": "u", "wh') == {"t": "passed"}


def test_where_nothing_was_written_nothing_ran(tmp_path):
    assert outcomes.read(tmp_path / "outcomes.jsonl") == {}


def test_a_test_is_lost_unless_it_passes_with_the_plugin_too():
    stock = dict.fromkeys(("same", "fails", "errs", "skips", "is gone"), "passed") | {"fails in stock": "failed"}
    patched = {"same": "passed", "fails": "failed", "errs": "error", "skips": "skipped", "fails in stock": "failed"}
    assert outcomes.lost(stock, patched) == ["errs", "fails", "is gone", "skips"]


def test_what_passes_with_the_plugin_only_is_told_and_not_lost():
    stock, patched = {"t": "failed"}, {"t": "passed"}
    assert (outcomes.lost(stock, patched), outcomes.gained(stock, patched)) == ([], ["t"])


@pytest.mark.parametrize(
    ("stock", "patched", "verdict"),
    [
        ("passed passed passed", "failed failed failed", outcomes.LOST),
        ("passed passed passed", "passed passed failed", outcomes.LOST),
        ("passed passed passed", "passed missing passed", outcomes.LOST),
        ("passed failed passed", "failed failed failed", outcomes.FLAKY),
        ("passed missing passed", "passed passed passed", outcomes.FLAKY),
        ("passed passed passed", "passed passed passed", outcomes.UNSTEADY),
    ],
)
def test_a_lost_test_counts_only_where_stock_always_passes_again_and_we_do_not(stock, patched, verdict):
    runs = [[{} if how == "missing" else {"t": how} for how in each.split()] for each in (stock, patched)]
    assert outcomes.verdict("t", *runs) == verdict


def test_nothing_is_held_against_a_plugin_that_was_at_work():
    stock = [process(), process(pytest_=False)]
    patched = [process(a=("waiting", "", 0)), process(pytest_=False, a=APPLIED, counters=WORKED)]
    assert outcomes.objections(stock, patched, ["a"], 1) == []


@pytest.mark.parametrize(
    ("stock", "patched", "says"),
    [
        (process(a=APPLIED), process(a=APPLIED, counters=WORKED), "should run stock"),
        (process(), process(), "was not loaded"),
        (process(), process(a=("declined", "it differs", 0), counters=WORKED), "a was declined in MainProcess"),
        (process(), process(a=("reverted", "", 3), counters=WORKED), "a was reverted in MainProcess"),
        (process(), process(a=("applied", "", 1), counters=WORKED), "with 1 failures"),
        (process(), process(a=("waiting", "", 0), counters=WORKED), "a was applied in no process"),
        (process(), process(a=APPLIED), "a answered nothing"),
        (process(), process(a=APPLIED, counters={"a": {"left to stock": 5, "misses": 5, "bytes": 9}}), "a answered nothing"),
        (process(), process(a=APPLIED, counters={"a probe": {"hits": 5}}), "a answered nothing"),
        (process(), process(b=APPLIED, counters={"b": {"hits": 1}}), "a was applied in no process"),
        (process(), process(pytest_=False, a=APPLIED, counters=WORKED), "0 processes of pytest with the plugin, not 1"),
        (process(pytest_=False), process(a=APPLIED, counters=WORKED), "0 processes of pytest without the plugin, not 1"),
    ],
)
def test_outcomes_prove_nothing_where_the_plugin_was_not_at_work(stock, patched, says):
    assert any(says in objection for objection in outcomes.objections([stock], [patched], ["a"], 1))


def test_a_patch_that_is_not_meant_for_this_release_may_stay_off():
    patched = process(a=APPLIED, old=("not meant", "meant for vLLM <0.10", 0), counters=WORKED)
    assert outcomes.objections([process()], [patched], ["a"], 1) == []


def test_outcomes_are_counted_in_a_fixed_order():
    assert list(outcomes.tally({"a": "failed", "b": "passed", "c": "failed"}).items()) == [("passed", 1), ("failed", 2)]
