"""Pace: work that can wait, kept to a share of the time that passes."""

from __future__ import annotations

# Of the time that passes, and in seconds the most that may be saved up.
SHARE, MOST = 0.02, 0.005


class Later(Exception):
    """Not now: nothing is wrong, and nothing was changed."""


class Pace:
    """Says when there is time. Threads may lose a little of the account to each other; it can bear it."""

    __slots__ = ("_at", "_left")

    def __init__(self) -> None:
        self._at = 0.0
        self._left = 0.0

    def allows(self, now: float) -> bool:
        """Whether some work may be done at `now`, in seconds of a clock that only goes forward."""
        self._left = min(self._left + (now - self._at) * SHARE, MOST)
        self._at = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        """What the work took."""
        self._left -= seconds
