"""Interning: equal packed rows get one mask and one mask id, compared in full, within a byte budget."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict

import numpy as np

from . import device
from .packed import fingerprints

_mask_ids = itertools.count()

# What a mask's objects and its entry cost beside row and forms, roughly.
ENTRY_BYTES = 600


class Mask:
    """One distinct mask: its id, unique in the process, its row, its uses, and the device masks built from it so far."""

    __slots__ = ("fingerprint", "forms", "id", "key", "nbytes", "row", "uses")

    def __init__(self, key: bytes, fingerprint: tuple):
        self.id = next(_mask_ids)
        self.key = key
        self.row = np.frombuffer(key, dtype=np.int32)
        self.fingerprint = fingerprint
        self.forms: dict = {}
        self.nbytes = len(key) + ENTRY_BYTES
        self.uses = 0


class MaskTable:
    """Masks by their rows, least recently used forgotten first once rows and device masks pass `budget` bytes.

    The masks of the batch at hand are kept until `trim`, whatever the budget. Not for several threads at once: callers
    hold `lock`.
    """

    def __init__(self, budget: int, counters: dict | None = None):
        self.budget = budget
        self.nbytes = 0
        self.lock = threading.Lock()
        self.counters = counters if counters is not None else {"hits": 0, "misses": 0, "evictions": 0}
        self._masks: OrderedDict = OrderedDict()

    def __len__(self) -> int:
        return len(self._masks)

    def intern(self, rows: np.ndarray) -> list:
        """The mask of every row of a C-contiguous int32 [n, words].

        A fingerprint only names a candidate. Rows that share one are told apart by the hash of their bytes, which costs
        more; should they share that too, they take turns in one slot: slower, never wrong.
        """
        width, found, counters = rows.shape[1], [], self.counters
        for row, number in zip(rows, fingerprints(rows)):
            key = row.tobytes()
            slot: tuple = (width, number)
            mask = self._masks.get(slot)
            if mask is not None and mask.key != key:
                slot = (width, number, hash(key))
                mask = self._masks.get(slot)
                if mask is not None and mask.key != key:
                    self._forget(slot)
                    mask = None
            if mask is not None:
                self._masks.move_to_end(slot)
                counters["hits"] += 1
            else:
                mask = self._masks[slot] = Mask(key, slot)
                self.nbytes += mask.nbytes
                counters["misses"] += 1
            mask.uses += 1
            found.append(mask)
        return found

    def form(self, mask: Mask, vocab_size: int):
        """The device mask of `mask` for the first `vocab_size` logits.

        It is kept, and counted in the budget, from the mask's second use on. A mask that never comes back, of which a
        client can make as many as it likes, gets one that is quick to build instead.
        """
        form = mask.forms.get(vocab_size)
        if form is None:
            form = device.build(mask.row, vocab_size, quick=mask.uses == 1)
            if mask.uses > 1:
                mask.forms[vocab_size] = form
                mask.nbytes += form.nbytes
                if self._masks.get(mask.fingerprint) is mask:
                    self.nbytes += form.nbytes
        return form

    def trim(self) -> None:
        """Forget the least recently used masks until the budget holds."""
        while self.nbytes > self.budget and self._masks:
            self._forget(next(iter(self._masks)))
            self.counters["evictions"] += 1

    def _forget(self, slot: tuple) -> None:
        self.nbytes -= self._masks.pop(slot).nbytes
