"""Counters: what each patch did in this process, cheap enough for hot paths."""

from __future__ import annotations

import threading
from collections import defaultdict

_lock = threading.Lock()
_counters: dict = {}


def counters(patch: str) -> defaultdict:
    """The counters of a patch, created on first use: name -> number.

    An increment is not atomic. Threads that count at the same moment may lose one, which a counter can bear and a lock
    on a hot path cannot.
    """
    with _lock:
        return _counters.setdefault(patch, defaultdict(int))


def snapshot() -> dict:
    """A copy of all counters: patch -> {name: number}."""
    with _lock:
        return {patch: dict(values) for patch, values in _counters.items()}
