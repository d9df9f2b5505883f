"""The row cache: packed rows under (compiled grammar, state id), whole grammars forgotten least recently used first."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from weakref import WeakValueDictionary

import numpy as np

# What a state costs, and what a row costs beside its bits: dictionary entries, keys, headers, roughly.
_STATE_BYTES, _ROW_BYTES = 100, 250


def key_bytes(key: Hashable) -> int:
    """What a key holds: the text that a grammar was compiled from is a client's to choose."""
    return sum(map(sys.getsizeof, key)) if isinstance(key, tuple) else sys.getsizeof(key)


class GrammarRows:
    """The rows of one compiled grammar: state id -> int32 array [words]. Shared by all requests that use the grammar.

    States with equal rows share one: a thousand rows of their own would not stay in the CPU's caches, and copying one
    from memory takes several times as long (8 us for 1). `rows` may be read by any thread without a lock. It is emptied
    when the grammar is forgotten; whoever still holds this object simply misses, and what it adds then counts anew.
    """

    __slots__ = ("__weakref__", "_cache", "distinct", "key", "nbytes", "rows")

    def __init__(self, cache: RowCache, key: Hashable):
        self._cache = cache
        self.key = key
        self.rows: dict = {}
        self.distinct: dict = {}  # a row's bytes -> the array over them
        self.nbytes = 0

    def put(self, state: Hashable, row: np.ndarray) -> None:
        """Remember a copy of `row`, int32 [words], as what the grammar allows in `state`."""
        self._cache._put(self, state, row.tobytes())


class RowCache:
    """Rows of all grammars of a process, within `budget` bytes. Thread-safe."""

    def __init__(self, budget: int, counters: dict | None = None):
        self.budget = budget
        self.nbytes = 0
        self.counters = counters if counters is not None else {"evictions": 0}
        self._lock = threading.Lock()
        self._held: OrderedDict = OrderedDict()
        self._known: WeakValueDictionary = WeakValueDictionary()

    def grammar(self, key: Hashable) -> GrammarRows:
        """The rows of the grammar that `key` identifies: what it was compiled from, not the object it became."""
        with self._lock:
            rows = self._known.get(key)
            if rows is None:
                rows = self._known[key] = GrammarRows(self, key)
            elif key in self._held:
                self._held.move_to_end(key)
            return rows

    def __len__(self) -> int:
        return len(self._held)

    def _put(self, grammar: GrammarRows, state: Hashable, bits: bytes) -> None:
        # Here, not under the lock: it takes some microseconds, and bytes keep it.
        hash(bits)
        with self._lock:
            if state in grammar.rows:
                return
            row, size = grammar.distinct.get(bits), _STATE_BYTES
            if row is None:
                row = np.frombuffer(bits, dtype=np.int32)
                size += len(bits) + _ROW_BYTES
            if grammar.key not in self._held:
                size += key_bytes(grammar.key)
            if size > self.budget:
                return
            grammar.rows[state] = grammar.distinct[bits] = row
            grammar.nbytes += size
            self.nbytes += size
            self._held[grammar.key] = grammar
            self._held.move_to_end(grammar.key)
            while self.nbytes > self.budget:
                _, oldest = self._held.popitem(last=False)
                self.nbytes -= oldest.nbytes
                # A new dictionary, not clear(): a reader may be between its look-up and its copy.
                oldest.rows, oldest.distinct, oldest.nbytes = {}, {}, 0
                self.counters["evictions"] += 1
