"""Application: packed rows onto logits, through interned masks and their device masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from . import device, interning
from .packed import WORD


class MaskApplier:
    """Applies packed rows to CPU logits and remembers the device masks within `budget` bytes."""

    def __init__(self, budget: int, counters: dict | None = None):
        self.table = interning.MaskTable(budget, counters)
        self._applier = device.Applier()

    @staticmethod
    def supports(logits: torch.Tensor) -> bool:
        """Whether these logits can be masked here: on the CPU, of a known dtype, rows contiguous."""
        return (
            logits.device.type == "cpu"
            and logits.dtype in device.DTYPES
            and logits.dim() == 2
            and (logits.stride(1) == 1 or logits.shape[1] <= 1)
        )

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: Sequence[int]) -> None:
        """Set to minus infinity, in place, what row i disallows in `logits[indices[i]]`.

        `logits` is [n, vocab] and passes `supports`; `rows` is C-contiguous int32 [len(indices), words]. Logits past
        the rows' last bit stay as they are, bits past the last logit are ignored. Raises IndexError, before anything
        is written, for an index out of range.
        """
        count, width = logits.shape
        if len(rows) != len(indices) or any(not 0 <= index < count for index in indices):
            raise IndexError(f"{len(rows)} rows for logits {tuple(logits.shape)} at {list(indices)}")
        vocab_size, table = min(width, rows.shape[1] * WORD), self.table
        with table.lock:
            placed = [(index, table.form(mask, vocab_size)) for index, mask in zip(indices, table.intern(rows))]
            self._applier.apply(logits, vocab_size, placed)
            table.trim()
