"""What a running process tells: `vllm-speedups status`, a line in the log, Prometheus; in forks too, and to nobody else."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from vllm_speedups import cli, metrics, reporter, status

PATCH = {
    "name": "block-hashes",
    "status": "applied",
    "reason": "",
    "failures": 1,
    "verified": 2,
    "differences": 0,
    "counters": {"hits": 1234, "misses": 5, "bytes": 3 * 2**20, "requests left to stock": 7},
}


def state_of(pid: int, **counters) -> dict:
    patch = {**PATCH, "counters": counters or PATCH["counters"]}
    return {"pid": pid, "parent": os.getppid(), "vllm_speedups": "0", "vllm": "0.32.0", "patches": [patch]}


@pytest.fixture
def place(tmp_path_factory, monkeypatch):
    tmp_path_factory.getbasetemp()
    # A short path: the system allows some hundred characters for a socket.
    with tempfile.TemporaryDirectory(prefix="vs") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield reporter.folder()


def started(serves: bool = True, minutes: float = 0, state=lambda: state_of(os.getpid())):
    one = reporter.Reporter(state, status.line, serves, minutes)
    one.start()
    return one


def until(true, seconds: float = 20):
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_a_process_answers_whoever_of_its_user_asks(place):
    started()
    assert reporter.pids() == [os.getpid()]
    assert reporter.ask(os.getpid()) == reporter.ask(os.getpid()) == state_of(os.getpid())
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_fork_answers_for_itself(place):
    started(state=lambda: state_of(os.getpid()))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    try:
        assert until(lambda: reporter.ask(child)) == {**state_of(child), "parent": os.getpid()}
        # Those of other tests are started in the fork too, and open the same socket one after another.
        assert until(lambda: sorted(reporter.pids(os.getpid())) == sorted([os.getpid(), child]))
        assert until(lambda: reporter.pids(child) == [child])
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
    # It ended without a word; the next who asks cleans up.
    assert reporter.ask(child) is None and reporter.pids() == [os.getpid()]


def test_a_process_that_ends_takes_its_socket_with_it(place):
    code = (
        f"import tempfile; tempfile.tempdir = {tempfile.tempdir!r}\n"
        "from vllm_speedups import reporter, status\n"
        "reporter.Reporter(dict, status.line, True, 0).start()\n"
        "print(reporter.ask(__import__('os').getpid()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "{}"
    assert reporter.pids() == []


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_a_folder_that_others_could_enter_is_not_used(place, how, tmp_path, said):
    if how == "open":
        place.mkdir(mode=0o777)
        place.chmod(0o777)
    elif how == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("")
    started()
    assert reporter.ask(os.getpid()) is None
    assert ["will not see process" in text for text in said.texts(logging.INFO)] == [True]


def test_a_path_too_long_for_a_socket_is_said_and_nothing_breaks(place, monkeypatch, said, tmp_path):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    started()
    assert ["will not see process" in text for text in said.texts(logging.INFO)] == [True]


def test_nothing_is_opened_where_the_user_wants_silence(place):
    before = threading.active_count()
    started(serves=False, minutes=0)
    assert not place.exists() and threading.active_count() == before


@pytest.mark.parametrize("serves", [True, False])
def test_a_line_is_logged_while_something_changes(place, said, serves):
    hits = [0]
    started(serves, minutes=0.02 / 60, state=lambda: state_of(os.getpid(), hits=hits[0], bytes=2**19))

    def lines():
        return [text for text in said.texts(logging.INFO) if "hits" in text]

    time.sleep(0.1)
    # Verified and failed count as something; the line stays the same and is not repeated.
    assert len(said.texts(logging.INFO)) == 1 and lines() == []
    hits[0] = 4321
    until(lines)
    time.sleep(0.1)
    assert lines() == ["vllm-speedups: block-hashes 4,321 hits, 2 verified, 1 failures, 0.5 MiB"]


def test_a_state_that_cannot_be_read_ends_the_reports_and_not_the_process(place, said):
    def broken():
        raise RuntimeError("no state")

    started(minutes=0.02 / 60, state=broken)
    until(lambda: said.texts(logging.WARNING))
    assert "no state" in said.texts(logging.WARNING)[0]


def test_a_client_that_hangs_up_does_not_end_the_reports(place):
    started()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.connect(str(reporter.folder() / f"{os.getpid()}.sock"))
    assert reporter.ask(os.getpid())


def test_status_shows_every_number_for_people_and_programs(place, capsys):
    started()
    assert cli.main(["status"]) == 0
    table = capsys.readouterr().out
    assert f"pid {os.getpid()}" in table and "requests left to stock 7" in table
    (row,) = [line.split() for line in table.splitlines() if line.strip().startswith("block-hashes")]
    assert row == ["block-hashes", "applied", "3.0", "1,234", "5", "0", "2", "0", "1"]
    assert cli.main(["status", "--json", str(os.getpid())]) == 0
    assert json.loads(capsys.readouterr().out) == [state_of(os.getpid())]


def test_status_of_nothing_says_where_it_looked(place, capsys):
    assert cli.main(["status"]) == 1
    assert str(place) in capsys.readouterr().err
    assert cli.main(["status", "1"]) == 1
    assert "process 1 or its children" in capsys.readouterr().err


def test_prometheus_gets_this_process_and_its_children(place):
    client = pytest.importorskip("prometheus_client")
    started()
    registry = client.CollectorRegistry()
    registry.register(metrics.Collector(lambda: state_of(os.getpid())))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    try:
        until(lambda: reporter.ask(child))
        for pid in (os.getpid(), child):
            labels = {"patch": "block-hashes", "process": str(pid)}
            value = registry.get_sample_value
            assert value("vllm_speedups_applied", labels) == 1
            assert value("vllm_speedups_held", {**labels, "what": "bytes"}) == 3 * 2**20
            assert value("vllm_speedups_events_total", {**labels, "event": "requests_left_to_stock"}) == 7
            assert value("vllm_speedups_events_total", {**labels, "event": "failures"}) == 1
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
