"""Compiled guides, shared between requests: one compilation for each specification, kept within a byte budget."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Callable
from weakref import WeakValueDictionary

# Bytes that one transition takes: in outlines_core's hash maps, and in Python's dictionaries beside the table.
_INDEX_BYTES, _INTEGER_BYTES = 13, 64
# What a guide costs beside its transitions, roughly: its objects, its entries in three dictionaries, a tensor.
_GUIDE_BYTES = 4000
_VISITS, _SAMPLES = 40, 16


class GuideCache:
    """Compiled guides by what they were compiled from, least recently used forgotten first. Thread-safe.

    A guide that is still in use is shared whatever the budget; a budget of 0 shares nothing.
    """

    def __init__(self, budget: int, size: Callable, counters: dict | None = None):
        self.budget = budget
        self.nbytes = 0
        self.counters = counters if counters is not None else {"compiled": 0, "guides shared": 0}
        self._size = size
        self._lock = threading.Lock()
        self._held: OrderedDict = OrderedDict()
        self._alive: WeakValueDictionary = WeakValueDictionary()
        self._compiling: dict = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: tuple, compiled: Callable[[], object]):
        """The guide of `key`, made by `compiled()` where it is not known, by one thread while others wait for it.

        What `compiled` raises is raised. Threads that waited in vain compile for themselves.
        """
        if not self.budget:
            return compiled()
        with self._lock:
            guide = self._alive.get(key)
            if guide is not None:
                if key in self._held:
                    self._held.move_to_end(key)
                self.counters["guides shared"] += 1
                return guide
            waiting = self._compiling.get(key)
            if waiting is None:
                self._compiling[key] = future = Future()
        if waiting is not None:
            guide = waiting.result()
            if guide is not None:
                self.counters["guides shared"] += 1
                return guide
            return compiled()
        guide = None
        try:
            guide = compiled()
            self._keep(key, guide)
        finally:
            with self._lock:
                del self._compiling[key]
            future.set_result(guide)
        return guide

    def _keep(self, key: tuple, guide) -> None:
        # The specification, of any length, is part of the key.
        size = self._size(guide) + _GUIDE_BYTES + sum(len(part) for part in key if isinstance(part, str))
        with self._lock:
            self.counters["compiled"] += 1
            self._alive[key] = guide
            if size > self.budget:
                return
            self._held[key] = (guide, size)
            self.nbytes += size
            while self.nbytes > self.budget:
                _, (_, freed) = self._held.popitem(last=False)
                self.nbytes -= freed


def table_bytes(maps: dict) -> int:
    """What a transition table {state: {token: state}} of Python dictionaries holds, roughly."""
    return sum(sys.getsizeof(tokens) + _INTEGER_BYTES * len(tokens) for tokens in maps.values())


def index_bytes(
    initial: int, allowed: Callable[[int], list | None], following: Callable[[int, int], int | None]
) -> int:
    """What an index of outlines_core holds, roughly, asked for a few of its states only.

    `allowed(state)` lists the tokens of a state, None where there are none, and `following(state, token)` is the state
    after one of them. (All transitions at once would be Python objects of ten times their size.)
    """
    seen, waiting, lengths = {initial}, [initial], []
    while waiting and len(lengths) < _VISITS:
        state = waiting.pop(0)
        listed = allowed(state) or []
        lengths.append(len(listed))
        for token in listed[:: max(1, len(listed) // _SAMPLES)]:
            after = following(state, token)
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    # States are numbered from zero, with gaps.
    return int(sum(lengths) / len(lengths) * (max(seen) + 1) * _INDEX_BYTES)
