"""Reporting from a running process: a local socket that tells its state, and a line in the log while something changes.

Both are one sleeping thread a process. The sockets lie in a folder that only the user who runs vLLM can enter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Callable

logger = logging.getLogger("vllm.speedups")

# Seconds that a question may take: the process that answers may be busy.
PATIENCE = 2.0
_SUFFIX = ".sock"


def folder() -> Path:
    """Where the sockets of this user's processes are."""
    return Path(tempfile.gettempdir()) / f"vllm-speedups-{os.getuid()}"


class Reporter:
    """Answers everybody who connects with `state()` as JSON; every `minutes` it logs `line(state)`, if that changed.

    `serves` says whether to open the socket; `minutes` of 0 means no lines.
    """

    def __init__(self, state: Callable[[], dict], line: Callable[[dict], str], serves: bool, minutes: float):
        self._state = state
        self._line = line
        self._serves = serves
        self._seconds = 60 * minutes if minutes else None
        self._pid: int | None = None
        self._socket: socket.socket | None = None
        self._path: Path | None = None

    def start(self) -> None:
        """Begin to report from this process, if it does not yet. Never raises."""
        if self._pid == os.getpid() or not (self._serves or self._seconds):
            return
        first, self._pid, self._socket, self._path = self._pid is None, os.getpid(), None, None
        if self._serves:
            try:
                self._open()
            except OSError as error:
                logger.info("vllm-speedups: `vllm-speedups status` will not see process %d: %s", self._pid, error)
        if self._socket is not None or self._seconds:
            threading.Thread(target=self._run, name="vllm-speedups-reporter", daemon=True).start()
        if first:
            atexit.register(self._close)
            # A forked worker has no thread of ours, and vLLM does not load plugins there a second time.
            os.register_at_fork(after_in_child=self.start)

    def _open(self) -> None:
        place = folder()
        place.mkdir(mode=0o700, exist_ok=True)
        about = place.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{place} is not a folder of this user alone: remove it")
        path = place / f"{self._pid}{_SUFFIX}"
        # What a process of the same number left behind.
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            listening.listen(8)
        except OSError:
            listening.close()
            raise
        self._socket, self._path = listening, path

    def _close(self) -> None:
        if self._pid == os.getpid() and self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _run(self) -> None:
        last, due = None, time.monotonic() + (self._seconds or float("inf"))
        while True:
            try:
                self._wait(due)
                if time.monotonic() >= due:
                    due = time.monotonic() + self._seconds
                    line = self._line(self._state())
                    if line and line != last:
                        last = line
                        logger.info("%s", line)
            except Exception as error:
                logger.warning("vllm-speedups: process %d reports nothing any more: %r", os.getpid(), error)
                return

    def _wait(self, due: float) -> None:
        """Answer one question, or let the time until `due` pass."""
        left = max(0.0, due - time.monotonic())
        if self._socket is None:
            time.sleep(left)
            return
        self._socket.settimeout(None if left == float("inf") else left)
        try:
            asking, _ = self._socket.accept()
        except (TimeoutError, socket.timeout):
            return
        with asking:
            asking.settimeout(PATIENCE)
            # Whoever asked may have gone.
            with contextlib.suppress(OSError):
                asking.sendall(json.dumps(self._state()).encode())


def ask(pid: int) -> dict | None:
    """The state of a process of this user, or None where it does not answer. The socket of a dead one is removed."""
    path = folder() / f"{pid}{_SUFFIX}"
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(PATIENCE)
            asking.connect(str(path))
            while more := asking.recv(65536):
                answer += more
        return json.loads(answer)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    except (OSError, ValueError):
        return None


def pids(ancestor: int | None = None) -> list:
    """The processes of this user that have a socket; with `ancestor` that one and those that descend from it."""
    known = sorted(int(path.stem) for path in folder().glob(f"*{_SUFFIX}") if path.stem.isdigit())
    return [pid for pid in known if ancestor is None or ancestor in _lineage(pid)]


def parent_of(pid: int) -> int | None:
    """The parent of a process, or None where the system does not say."""
    try:
        # The name, in brackets, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _lineage(pid: int) -> list:
    line = [pid]
    while (parent := parent_of(line[-1])) and parent not in line:
        line.append(parent)
    return line
