"""Resident masks: rows that stay on a device under their mask ids, so that a step sends only what is new.

A step is one *packet*: the slots that its rows are in, the logits that they are for, and the rows that the device has not got
yet, one after another in a staging buffer of host memory, which is kept, and copied to the device at once. There the new
rows are put in their slots, and one kernel masks the logits, reading each row where it lies.

docs/cuda-masks.md says why nothing is overwritten while the device may still read it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .interning import ENTRY_BYTES, MaskTable
from .packed import WORD

# Staging buffers: the host is seldom more than two steps ahead of the device.
BUFFERS = 3
# Rows in a packet that has to carry more new ones than ever are sent in several.
NEW_ROWS = 64
# Rows that one step may mask.
STEP_ROWS = 8192
# Parts of a packet begin at 16 bytes: Triton compiles another kernel for pointers that are less aligned.
_ALIGN = 4


class ResidentMasks:
    """Rows on one device, all of one width in words, least recently used replaced first.

    `kernel` is one of `kernels`. `budget` in bytes is what the rows on the device may take; on the host they take as much
    again. One thread at a time: `table.lock` is held.
    """

    def __init__(self, lane, kernel: Callable, device: torch.device, words: int, budget: int, counters: dict):
        self.capacity = budget // (4 * words)
        # Ids that live as long as the rows under them.
        self.table = MaskTable(self.capacity * (4 * words + ENTRY_BYTES), counters)
        self.words, self.counters = words, counters
        self._lane, self._kernel = lane, kernel
        size = NEW_ROWS * (words + 2) + 2 * STEP_ROWS + 4 * _ALIGN
        # Not inference tensors, which could be written to in inference mode only.
        with torch.inference_mode(False):
            self._pool = torch.empty((self.capacity, words), dtype=torch.int32, device=device)
            self._packet = torch.empty(size, dtype=torch.int32, device=device)
            self._staging = [_Staging(lane, size) for _ in range(BUFFERS)]
        self._turn = 0
        self._forget_all()

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, targets: Sequence[int], starts=None, stride: int = 0
    ) -> bool:
        """Mask `logits` [n, width], on the device, in place, as `kernels` says; False, and nothing done, where it cannot.

        `rows` is C-contiguous int32 [m, words]; bits past the last logit are ignored, logits past the last bit kept.
        """
        count = len(rows)
        if not count:
            return True
        vocab_size = min(logits.shape[1], self.words * WORD)
        with self.table.lock:
            masks = self.table.intern(rows)
            needed = {mask.id: mask for mask in masks}
            served = len(needed) <= self.capacity and count <= STEP_ROWS
            if served:
                try:
                    self._send(logits, masks, needed, targets, starts, stride, vocab_size)
                except BaseException:
                    # What has not been sent must not be believed to be there.
                    self._forget_all()
                    raise
            self.table.trim()
        return served

    def _send(self, logits, masks: list, needed: dict, targets, starts, stride: int, vocab_size: int) -> None:
        new = self._place(needed)
        self._lane.enter([self._pool, self._packet])
        try:
            while len(new) > NEW_ROWS:
                self._packet_of([], [], new[:NEW_ROWS])
                new = new[NEW_ROWS:]
            slots, placed = self._packet_of([self._slots[mask.id] for mask in masks], targets, new)
            self._lane.launch(self._kernel, logits, self._pool, slots, placed, starts, stride, vocab_size)
        finally:
            self._lane.leave()

    def _place(self, needed: dict) -> list:
        """Give every mask of the step a slot. Returns (slot, row) of those that are new on the device."""
        slots, new = self._slots, []
        for number in needed:
            if number in slots:
                slots.move_to_end(number)
        # What the step needs is behind everything else now, so that it is never what makes room.
        for number, mask in needed.items():
            if number not in slots:
                if self._free:
                    slot = self._free.pop()
                else:
                    _, slot = slots.popitem(last=False)
                    self.counters["rows replaced"] += 1
                slots[number] = slot
                new.append((slot, mask.row))
        self.counters["rows sent"] += len(new)
        return new

    def _packet_of(self, slots: list, targets: Sequence[int], new: list) -> tuple:
        """Send a packet and put its new rows into the pool. Its slots and targets, int32, as they are on the device."""
        staging = self._staging[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        if not staging.event.query():
            self.counters["staging waits"] += 1
            staging.event.synchronize()
        count, array = len(slots), staging.array
        at = _aligned(count)
        places = at + _aligned(count)
        values = places + _aligned(2 * len(new))
        end = values + len(new) * self.words
        array[:count] = slots
        array[at : at + count] = targets
        # index_copy_ takes int64.
        array[places : places + 2 * len(new)].view(np.int64)[:] = [slot for slot, _ in new]
        for number, (_, row) in enumerate(new):
            array[values + number * self.words : values + (number + 1) * self.words] = row
        packet = self._packet
        self._lane.upload(packet[:end], staging.words[:end])
        self._lane.record(staging.event)
        self.counters["bytes sent"] += 4 * end
        if new:
            index = packet[places : places + 2 * len(new)].view(torch.int64)
            self._lane.launch(self._pool.index_copy_, 0, index, packet[values:end].view(len(new), self.words))
        return packet[:count], packet[at : at + count]

    def _forget_all(self) -> None:
        self._slots: OrderedDict = OrderedDict()
        self._free = list(range(self.capacity))


class _Staging:
    """A staging buffer, `words` as int32 tensor and `array` as NumPy sees it, with the event behind its last upload."""

    def __init__(self, lane, size: int):
        self.words = lane.staging(size)
        self.array = self.words.numpy()
        self.event = lane.event()


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
