"""The state cache: biases under (guide, kind of scores, state id), whole guides forgotten least recently used first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

# What the entry of one state costs beside its bias, and what a guide costs without any, roughly.
_ENTRY_BYTES, _GUIDE_BYTES = 200, 1000


class States:
    """The biases of one guide for one kind of scores: state id -> bias. Emptied when the guide is forgotten."""

    __slots__ = ("biases", "key", "nbytes", "owned")

    def __init__(self, key: Hashable):
        self.key = key
        self.biases: dict = {}
        self.owned: set = set()
        self.nbytes = 0


class StateCache:
    """Biases of all guides of a process, within `budget` bytes. Thread-safe.

    Equal biases, compared in full, are one object, which many states share: a bounded string has a state for every
    length and one bias for most of them.
    """

    def __init__(self, budget: int, counters: dict | None = None):
        self.budget = budget
        self.nbytes = 0
        self.counters = counters if counters is not None else {"guides forgotten": 0}
        self._lock = threading.Lock()
        self._held: OrderedDict = OrderedDict()
        # (kind, key of the bias) -> [bias, how many guides use it]
        self._biases: dict = {}

    def __len__(self) -> int:
        return len(self._held)

    def states(self, guide: Hashable, kind: Hashable) -> States | None:
        """What is known of a guide for scores of one kind: length, dtype and device. Takes no lock."""
        return self._held.get((guide, kind))

    def used(self, guide: Hashable, kind: Hashable) -> None:
        """Note that a request of this guide has begun."""
        key = (guide, kind)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)

    def put(self, guide: Hashable, kind: Hashable, state: Hashable, bias):
        """Remember `bias` for a state. Returns it, or the equal one that is known already."""
        key, slot = (guide, kind), (kind, bias.key)
        with self._lock:
            shared = self._biases.get(slot)
            if shared is not None:
                bias = shared[0]
            elif bias.nbytes + _ENTRY_BYTES > self.budget:
                return bias
            states = self._held.get(key)
            if states is None:
                states = self._held[key] = States(key)
                states.nbytes = _GUIDE_BYTES
                self.nbytes += _GUIDE_BYTES
            self._held.move_to_end(key)
            if state in states.biases:
                return bias
            states.biases[state] = bias
            states.nbytes += _ENTRY_BYTES
            self.nbytes += _ENTRY_BYTES
            if slot not in states.owned:
                states.owned.add(slot)
                if shared is None:
                    shared = self._biases[slot] = [bias, 0]
                    self.nbytes += bias.nbytes
                shared[1] += 1
            while self.nbytes > self.budget:
                self._forget()
        return bias

    def _forget(self) -> None:
        _, oldest = self._held.popitem(last=False)
        self.nbytes -= oldest.nbytes
        for slot in oldest.owned:
            shared = self._biases[slot]
            shared[1] -= 1
            if not shared[1]:
                del self._biases[slot]
                self.nbytes -= shared[0].nbytes
        # A new dictionary, not clear(): a reader may hold this one.
        oldest.biases = {}
        self.counters["guides forgotten"] += 1
