"""Inside the processes of vLLM's tests: notes what became of each test, and what the plugin did in each process.

A plugin of pytest, which loads vLLM's plugins as an engine would, and one of vLLM's own, so that vLLM itself brings it into
every process that it starts. Stands apart from the rest: it's copied beside the packages that the tests need.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path

FOLDER = "CONFORMANCE_RECORDS"
OUTCOMES = "outcomes.jsonl"
# Some tests nest JSON deeper than Python 3.11 reads by default; later ones don't count those levels.
RECURSION = 6000
# An engine that is killed writes nothing at its end: seconds between looks.
INTERVAL = 0.5

_written: dict = {}
_in_pytest = False


def register() -> None:
    """What vLLM calls in each of its processes."""
    if not _written:
        _watch()
        os.register_at_fork(after_in_child=_watch)


def _watch() -> None:
    """Write every while, and at the end. A forked process starts anew, with the counters of its parent.

    Not at once: vLLM may load the plugin after us.
    """
    _written["record"] = None
    atexit.register(_write)
    multiprocessing.util.Finalize(None, _write, exitpriority=1)
    threading.Thread(target=_repeat, name="conformance-witness", daemon=True).start()


def _repeat() -> None:
    pause = threading.Event()
    while not pause.wait(INTERVAL):
        _write()


def _write() -> None:
    record = _record()
    if record == _written.get("record"):
        return
    _written["record"] = record
    place = Path(os.environ[FOLDER], f"process-{os.getpid()}.json")
    draft = place.with_suffix(f".{threading.get_ident()}")
    draft.write_text(json.dumps(record))
    draft.replace(place)


def _record() -> dict:
    """What the plugin did in this process; no patches where it was not loaded."""
    plugin, telemetry = (sys.modules.get(f"vllm_speedups.{name}") for name in ("plugin", "telemetry"))
    patches = plugin.patches() if plugin else []
    return {
        "process": multiprocessing.current_process().name,
        "pytest": _in_pytest,
        "vllm": getattr(sys.modules.get("vllm"), "__version__", None),
        "patches": {patch.name: [patch.status, patch.reason, patch.failures] for patch in patches},
        "counters": telemetry.snapshot() if telemetry else {},
    }


def pytest_configure(config) -> None:
    global _in_pytest
    _in_pytest = True
    os.register_at_fork(after_in_child=_left_pytest)
    sys.setrecursionlimit(RECURSION)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    register()


def _left_pytest() -> None:
    global _in_pytest
    _in_pytest = False


def pytest_collection_modifyitems(items) -> None:
    # vLLM's tests look at all garbage after each test that doesn't bear this mark of theirs: most of the time that they take.
    # Once a module will do, and after each engine.
    for item, following in zip(items, items[1:]):
        if item.path == following.path and "vllm_runner" not in item.fixturenames:
            item.add_marker("skip_global_cleanup")


def pytest_collectreport(report) -> None:
    if report.failed:
        _note(report.nodeid, "collect", "failed", str(report.longrepr))


def pytest_runtest_logreport(report) -> None:
    outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
    _note(report.nodeid, report.when, outcome, "" if report.passed else _reason(report))


def _reason(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)


def _note(nodeid: str, when: str, outcome: str, reason: str) -> None:
    with Path(os.environ[FOLDER], OUTCOMES).open("a") as file:
        file.write(json.dumps({"test": nodeid, "when": when, "outcome": outcome, "reason": reason[-1000:]}) + "\n")
