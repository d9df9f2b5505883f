"""What became of vLLM's tests without and with the plugin: which were lost, which are flaky, and if that proves anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

PASSED = "passed"
# Worse ones come later: a test is what its worst phase is.
ORDER = (PASSED, "xfailed", "skipped", "failed", "error")
LOST, FLAKY, UNSTEADY = "lost", "flaky", "unsteady"


def read(file: Path) -> dict:
    """The outcomes in what the witness wrote, by test; a last line that a crash cut off is left out."""
    outcomes: dict = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            note = json.loads(line)
        except ValueError:
            continue
        outcome = note["outcome"]
        if outcome == "failed" and note["when"] != "call":
            outcome = "error"
        outcomes[note["test"]] = max(outcome, outcomes.get(note["test"], outcome), key=ORDER.index)
    return outcomes


def lost(stock: Mapping, patched: Mapping) -> list:
    """The tests that pass without the plugin and don't pass, or aren't there, with it."""
    return sorted(test for test, outcome in stock.items() if outcome == PASSED and patched.get(test) != PASSED)


def gained(stock: Mapping, patched: Mapping) -> list:
    """The tests that pass with the plugin only: none that the plugin makes right, but ones that are not steady."""
    return lost(patched, stock)


def verdict(test: str, stock: Iterable, patched: Iterable) -> str:
    """What a lost test is, from the outcomes of running it again, several times without and with the plugin.

    FLAKY where stock doesn't pass each time either, UNSTEADY where it always passes again both ways, else LOST.
    """
    if any(outcomes.get(test) != PASSED for outcomes in stock):
        return FLAKY
    return LOST if any(outcomes.get(test) != PASSED for outcomes in patched) else UNSTEADY


def objections(stock: list, patched: list, meant: Iterable, groups: int) -> list:
    """Why the outcomes prove nothing, a line each; none if the plugin was at work where they came about.

    `stock` and `patched` are the records of all processes, `meant` the patches that are meant for this vLLM, `groups` how many
    processes of pytest there should be in each.
    """
    found = []
    for process in stock:
        if process["patches"]:
            found.append(f"the plugin was loaded in a process that should run stock ({process['process']})")
    for name, records in (("without", stock), ("with", patched)):
        count = sum(process["pytest"] for process in records)
        if count != groups:
            found.append(f"{count} processes of pytest {name} the plugin, not {groups}")
    for process in patched:
        if not process["patches"]:
            found.append(f"the plugin was not loaded in a process that should have it ({process['process']})")
        for patch, (status, reason, failures) in process["patches"].items():
            if patch in meant and (status not in ("applied", "waiting") or failures):
                found.append(f"{patch} was {status} in {process['process']}, with {failures} failures: {reason or '-'}")
    for patch in meant:
        if not any(process["patches"].get(patch, [""])[0] == "applied" for process in patched):
            found.append(f"{patch} was applied in no process")
        if not any(worked(patch, process).get("hits") for process in patched):
            found.append(f"{patch} answered nothing in any process: no test touched it")
    return list(dict.fromkeys(found))


def worked(patch: str, process: Mapping) -> dict:
    """What a patch answered in one process, and what it computed to answer it later."""
    counts = process["counters"].get(patch, {})
    return {name: counts[name] for name in ("hits", "misses") if counts.get(name)}


def tally(outcomes: Mapping) -> dict:
    """How many tests have which outcome, in the order of ORDER."""
    values = list(outcomes.values())
    return {outcome: values.count(outcome) for outcome in ORDER if outcome in values}
