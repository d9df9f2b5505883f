"""Device masks: what is kept on the logits' device to apply one mask, in whichever of three forms is cheapest.

Ids serve the two ends, the dense form everything between: `vllm-speedups bench mask` measures where they cross over.
masked_fill_, torch.where, numpy.copyto and fmin were tried for the dense form and are not vectorised; keep/or with two words
of bits a logit is, but takes 1.2 MB a mask and loses where masks differ from row to row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from .packed import WORD, allowed_ids, disallowed_ids, unpack

# Where the dense form starts to win, as shares of the vocabulary (measured for float32 and bfloat16, see above).
ALLOWED_SHARE = 1 / 200
DISALLOWED_SHARE = 1 / 20

# The integer type that views a logit, and the bits of its minus infinity.
VIEWS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_MINUS_INFINITY = {
    dtype: int(torch.tensor([-math.inf], dtype=dtype).view(view).item()) for dtype, view in VIEWS.items()
}
DTYPES = frozenset(VIEWS)


class AllowedIds:
    """Few tokens are allowed: their logits are kept aside while the whole row is filled."""

    def __init__(self, row: np.ndarray, vocab_size: int):
        self.ids = allowed_ids(row, vocab_size)
        self.nbytes = self.ids.nbytes


class DisallowedIds:
    """Few tokens are disallowed: those are overwritten."""

    def __init__(self, row: np.ndarray, vocab_size: int):
        self.ids = disallowed_ids(row, vocab_size)
        self.nbytes = self.ids.nbytes


class Dense:
    """Anything between: a byte per token, 1 where it is allowed, spread to a logit's width when it is applied."""

    def __init__(self, row: np.ndarray, vocab_size: int):
        self.allowed = torch.from_numpy(unpack(row, vocab_size))
        self.nbytes = vocab_size


class Unpacked:
    """What is dense for a mask that may not come again: its byte per token lives only while it is applied.

    64 such masks at once would be 10 MB of fresh memory, which costs more than unpacking them.
    """

    nbytes = 0

    def __init__(self, row: np.ndarray, vocab_size: int):
        self._row = row
        self._vocab_size = vocab_size

    @property
    def allowed(self) -> torch.Tensor:
        """uint8 [vocab], made anew."""
        return torch.from_numpy(unpack(self._row, self._vocab_size))


class Applier:
    """Applies device masks to CPU logits. Keeps scratch memory of a row's size: one thread at a time."""

    def __init__(self):
        self._scratch: dict = {}

    def apply(self, logits: torch.Tensor, vocab_size: int, placed: Sequence[tuple]) -> None:
        """Mask rows of `logits` [n, vocab] in place: `placed` holds (index, device mask), indices distinct.

        What the masks disallow among the first `vocab_size` logits of those rows becomes minus infinity; every other
        logit keeps its bits, NaN included.
        """
        dense: list = []
        groups: dict = {AllowedIds: [], DisallowedIds: [], Dense: dense, Unpacked: dense}
        for pair in sorted(placed, key=itemgetter(0)):
            groups[pair[1].__class__].append(pair)
        bits = logits.detach().view(VIEWS[logits.dtype])[:, :vocab_size]
        if groups[AllowedIds]:
            _keep_allowed(bits, _MINUS_INFINITY[logits.dtype], groups[AllowedIds])
        if groups[DisallowedIds]:
            _overwrite_disallowed(bits, _MINUS_INFINITY[logits.dtype], groups[DisallowedIds])
        if dense:
            self._select(bits, _MINUS_INFINITY[logits.dtype], dense)

    def _select(self, bits: torch.Tensor, infinity: int, placed: list) -> None:
        """`(bits - infinity) * allowed + infinity` in wrapping integers, which leaves the allowed as they are.

        Two vectorised passes over a row that stays in the cache, after one that spreads the mask. torch.where,
        masked_fill_ and fmin need one, but are not vectorised; adding minus infinity or taking the minimum are, but
        leave a disallowed NaN in place.
        """
        kind = (bits.dtype, bits.shape[1], infinity)
        if kind not in self._scratch:
            spread, base = torch.empty(bits.shape[1], dtype=bits.dtype), torch.tensor(infinity, dtype=bits.dtype)
            self._scratch = {kind: (spread, base)}
        spread, base = self._scratch[kind]
        last = None
        for index, form in sorted(placed, key=lambda pair: id(pair[1])):
            if form is not last:
                spread.copy_(form.allowed)
                last = form
            row = bits[index]
            row.sub_(infinity)
            try:
                torch.addcmul(base, row, spread, out=row)
            except BaseException:
                row.add_(infinity)
                raise


def _keep_allowed(bits: torch.Tensor, infinity: int, placed: list) -> None:
    array = bits.numpy()
    kept = [array[index].take(form.ids) for index, form in placed]
    # Neighbours are filled together, since every fill starts the threads anew (14 us here).
    try:
        for first, last, _ in _runs([(index, None) for index, _ in placed]):
            bits[first:last].fill_(infinity)
    finally:
        for (index, form), values in zip(placed, kept):
            array[index][form.ids] = values


def _overwrite_disallowed(bits: torch.Tensor, infinity: int, placed: list) -> None:
    rows = list(bits.numpy())
    for first, last, form in _runs([pair for pair in placed if pair[1].nbytes]):
        if last > first + 1:
            bits[first:last].index_fill_(1, torch.from_numpy(form.ids), infinity)
        else:
            # One row: NumPy's single thread is done before torch has started several.
            rows[first][form.ids] = infinity


def _runs(pairs: list) -> Iterator[tuple]:
    """Neighbouring indices with the same device mask, as (first, last + 1, device mask)."""
    start = 0
    for end in range(1, len(pairs) + 1):
        if end == len(pairs) or pairs[end][0] != pairs[end - 1][0] + 1 or pairs[end][1] is not pairs[start][1]:
            yield pairs[start][0], pairs[end - 1][0] + 1, pairs[start][1]
            start = end


def build(row: np.ndarray, vocab_size: int, quick: bool = False):
    """The cheapest device mask for a contiguous packed row int32[words], over the first `vocab_size` logits.

    `quick` counts building too, for a mask that may not be used again. `nbytes` is what it holds in bytes. It serves
    logits of any dtype.
    """
    # Words say already what most masks are; only one in doubt is unpacked as a whole.
    set_words, unset_words = np.count_nonzero(row), np.count_nonzero(row != -1)
    if set_words <= vocab_size * ALLOWED_SHARE / WORD:
        form: Any = AllowedIds(row, vocab_size)
    elif unset_words <= (len(row) / 4 if quick else vocab_size * DISALLOWED_SHARE / WORD):
        form = DisallowedIds(row, vocab_size)
    elif quick:
        form = Unpacked(row, vocab_size)
    else:
        form = Dense(row, vocab_size)
        allowed = int(np.count_nonzero(form.allowed.numpy().view(np.bool_)))
        if allowed <= vocab_size * ALLOWED_SHARE:
            form = AllowedIds(row, vocab_size)
        elif vocab_size - allowed <= vocab_size * DISALLOWED_SHARE:
            form = DisallowedIds(row, vocab_size)
    return form
