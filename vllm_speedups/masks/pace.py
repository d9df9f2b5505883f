"""Pace: work that can wait, kept to a share of the time that passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Of the time that passes, and in seconds the most that may be saved up: for walking, while requests wait.
SHARE, MOST = 0.015, 0.005
# The same for building networks, on a thread of its own but beside the interpreter lock: of the CPU time that the process
# takes, since on a busy machine that is little of the time that passes; and of the time that copied rows save.
BUILD_SHARE, BUILD_MOST, BUILD_RETURNS = 0.005, 1.0, 0.1


class Later(Exception):
    """Not now: nothing is wrong, and nothing was changed."""


class Pace:
    """Says when there is time. Threads may lose a little of the account to each other; it can bear it."""

    __slots__ = ("_at", "_left", "most", "share")

    def __init__(self, share: float = SHARE, most: float = MOST) -> None:
        self.share = share
        self.most = most
        self._at = 0.0
        self._left = 0.0

    def allows(self, now: float) -> bool:
        """Whether some work may be done at `now`, in seconds of a clock that only goes forward."""
        self._left = min(self._left + (now - self._at) * self.share, self.most)
        self._at = now
        return self._left > 0

    def earn(self, seconds: float) -> None:
        """More to spend, up to the most that may be saved up."""
        self._left = min(self._left + seconds, self.most)

    def spend(self, seconds: float) -> None:
        """What the work took."""
        self._left -= seconds


# Seconds of work at one go, and of rest after it, of a thread that shares the interpreter lock with the engine: a thread
# that only gives the lock up when it is asked to keeps the engine waiting 5 ms each time.
WORK, REST = 0.0005, 0.0015

_mine = threading.local()


@contextmanager
def resting() -> Iterator[None]:
    """Within it, `rest` makes this thread rest."""
    _mine.until = time.perf_counter() + WORK
    try:
        yield
    finally:
        del _mine.until


def rest() -> None:
    """For loops to call, some microseconds of work apart: sleeps if it is time to, on threads that rest."""
    until = getattr(_mine, "until", None)
    if until is not None and time.perf_counter() > until:
        time.sleep(REST)
        _mine.until = time.perf_counter() + WORK
