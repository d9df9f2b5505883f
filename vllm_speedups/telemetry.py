"""Counters and gauges: what each patch did in this process, cheap enough for hot paths."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Callable

_lock = threading.Lock()
_counters: dict = {}
_gauges: dict = {}


def counters(patch: str) -> defaultdict:
    """The counters of a patch, created on first use: name -> number.

    Every patch with a cache has "hits", "misses" and, once something was forgotten, "evictions". An increment is not
    atomic. Threads that count at the same moment may lose one, which a counter can bear and a lock on a hot path cannot.
    """
    with _lock:
        return _counters.setdefault(patch, defaultdict(int))


def gauge(patch: str, name: str, value: Callable[[], int]) -> None:
    """Have `value()` read whenever somebody looks: what a cache holds now, in "bytes" for instance."""
    with _lock:
        _gauges.setdefault(patch, {})[name] = value


def snapshot() -> dict:
    """All counters and gauges as they are now: patch -> {name: number}."""
    with _lock:
        taken = {patch: dict(values) for patch, values in _counters.items()}
        for patch, values in _gauges.items():
            taken.setdefault(patch, {}).update((name, value()) for name, value in values.items())
        return taken
