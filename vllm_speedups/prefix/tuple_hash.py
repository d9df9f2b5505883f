"""Hashes of a tuple's prefixes, exactly as CPython computes them, for the cost of hashing the tuple once.

`hash(t)` feeds the items' hashes into an accumulator of 64 bits and mixes in the length at the end (a form of xxHash,
since Python 3.8, `Objects/tupleobject.c`). All of that can be undone. So the accumulator behind a prefix is known from
the prefix's hash, and one can say which hash a first item must have for a new tuple to reach the same accumulator: a
tuple of that item and the tokens of the next block goes on, in C, where the prefix stopped.
"""

from __future__ import annotations

import functools
import sys
from itertools import repeat

import numpy as np

_MASK = 2**64 - 1
_PRIME_1 = 11400714785074694791
_PRIME_2 = 14029467366897019727
_PRIME_5 = 2870177450012600261
_LENGTH = _PRIME_5 ^ 3527539
# What CPython answers where the accumulator ends as -1, its sign of an error.
_SUBSTITUTE = 1546275796
_UNDO_1 = pow(_PRIME_1, -1, 2**64)
_UNDO_2 = pow(_PRIME_2, -1, 2**64)
# From here on NumPy pays: its fixed costs are 10 µs, and 100 where the caches hold other things.
_MANY = 512


class _Item:
    """An item whose hash is whatever is put into `value`, a signed 64-bit integer other than -1."""

    __slots__ = ("value",)

    def __init__(self, value: int = 0):
        self.value = value

    def __hash__(self) -> int:
        return self.value


def prefix_hashes(items: tuple, step: int, *others: object) -> list:
    """`[hash(items[:step]), hash(items[:2 * step]), ...]` for all full steps, in time linear in their number.

    With `others`, of `(prefix, other)`; with two of them, of `((prefix, other), another)`. Raises ValueError for a step
    below 1.
    """
    if step < 1:
        raise ValueError(f"a step of {step} items")
    final = step + 1 ^ _LENGTH
    item = _Item(_FIRST)
    hashes: list = []
    add = hashes.append
    # zip makes one tuple and fills it anew: nothing is allocated a block.
    for block in zip(repeat(item), *[iter(items)] * step):
        found = hash(block)
        add(found)
        accumulator = found - final
        # As in _item_hash, which a call would make a third slower.
        turned = accumulator * _UNDO_1 & _MASK
        wanted = ((turned >> 31 | turned << 33) - _PRIME_5) * _UNDO_2 & _MASK
        item.value = wanted if wanted < 2**63 else wanted - 2**64
    if _SUBSTITUTE in hashes or _unspeakable(step) in hashes:
        # Once in 2**63 blocks: the accumulator, or the item that would lead to it, cannot be told.
        hashes = [hash(items[:end]) for end in range(step, len(items) + 1, step)]
    elif len(hashes) >= _MANY:
        ends = np.arange(step, step * len(hashes) + 1, step, dtype=np.uint64)
        return _paired_in_bulk(_unsigned(hashes) - np.uint64(final) + (ends ^ np.uint64(_LENGTH)), others).tolist()
    else:
        at = range(step, len(items) + 1, step)
        hashes = [_answer(found - final + (end ^ _LENGTH)) for end, found in zip(at, hashes)]
    for other in others:
        hashes = _paired(hashes, other)
    return hashes


def _paired(hashes: list, other: object) -> list:
    item = _Item()
    found = []
    for item.value in hashes:
        found.append(hash((item, other)))
    return found


def _paired_in_bulk(values: np.ndarray, others: tuple) -> np.ndarray:
    """What CPython does for a tuple of two, for many at once. NumPy warns where one product overflows, not where many do."""
    values = _finished(values)
    for other in others:
        accumulators = values * np.uint64(_PRIME_2)
        accumulators += np.uint64(_PRIME_5)
        for product in (None, np.uint64(hash(other) * _PRIME_2 & _MASK)):
            if product is not None:
                accumulators += product
            accumulators = (accumulators << np.uint64(31) | accumulators >> np.uint64(33)) * np.uint64(_PRIME_1)
        values = _finished(accumulators + np.uint64(2 ^ _LENGTH))
    return values.view(np.int64)


def standing_for(value: int) -> object:
    """An object with this hash, which is not -1: stands for a tuple inside of a tuple that is hashed."""
    return _Item(value)


def extended(known: int, length: int, rest: tuple) -> int | None:
    """`hash(prefix + rest)`, given `hash(prefix)` and the prefix's length. None where it cannot be told, once in 2**63."""
    if known == _SUBSTITUTE:
        return None
    wanted = _signed(_item_hash(known - (length ^ _LENGTH) & _MASK))
    found = None if wanted == -1 else hash((_Item(wanted), *rest))
    if found in (None, _SUBSTITUTE):
        return None
    return _answer(found - (len(rest) + 1 ^ _LENGTH) + (length + len(rest) ^ _LENGTH))


def exact() -> bool:
    """Whether this Python hashes tuples in the way that is told here."""
    if sys.hash_info.width != 64:
        return False
    items = tuple(number * number * 7919 % 151_936 for number in range(_MANY + 20))
    for step in (1, 16):
        if prefix_hashes(items, step, None) != [hash((items[:end], None)) for end in range(step, len(items) + 1, step)]:
            return False
    return extended(hash(items), len(items), items[:5]) == hash(items + items[:5])


def _item_hash(accumulator: int) -> int:
    """The hash that a tuple's first item must have for this accumulator to stand behind it; unsigned."""
    turned = accumulator * _UNDO_1 & _MASK
    return ((turned >> 31 | turned << 33) - _PRIME_5) * _UNDO_2 & _MASK


@functools.lru_cache(maxsize=16)
def _unspeakable(step: int) -> int:
    """The hash of a block behind which the next item's hash would have to be -1, which no object's is."""
    turned = (_PRIME_5 - _PRIME_2) & _MASK
    accumulator = ((turned << 31 | turned >> 33) & _MASK) * _PRIME_1
    return _signed(accumulator + (step + 1 ^ _LENGTH) & _MASK)


def _signed(value: int) -> int:
    return value if value < 2**63 else value - 2**64


def _answer(value: int) -> int:
    value &= _MASK
    return _SUBSTITUTE if value == _MASK else _signed(value)


def _unsigned(hashes: list) -> np.ndarray:
    return np.array(hashes, np.int64).view(np.uint64)


def _finished(values: np.ndarray) -> np.ndarray:
    values[values == np.uint64(_MASK)] = _SUBSTITUTE
    return values


# The item that leaves the accumulator as it is before the first one.
_FIRST = _signed(_item_hash(_PRIME_5))
