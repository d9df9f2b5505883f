"""Packed rows: token masks as int32 words, bit i of word j standing for token 32*j + i (xgrammar's layout)."""

from __future__ import annotations

import secrets
from functools import lru_cache

import numpy as np

WORD = 32


def words_for(vocab_size: int) -> int:
    """How many int32 words hold a bit for each of `vocab_size` tokens."""
    return -(-vocab_size // WORD)


def pack(allowed: np.ndarray) -> np.ndarray:
    """A boolean mask [vocab] as a packed row int32[ceil(vocab/32)], with the bits past the vocabulary unset."""
    bits = np.zeros(words_for(len(allowed)) * WORD, dtype=np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def unpack(row: np.ndarray, vocab_size: int) -> np.ndarray:
    """The first `vocab_size` bits of a contiguous packed row as uint8 zeros and ones."""
    return np.unpackbits(row.view(np.uint8), count=vocab_size, bitorder="little")


def ids_of(row: np.ndarray, words: np.ndarray, vocab_size: int) -> np.ndarray:
    """The ids below `vocab_size` whose bit is set in the given words of a row, ascending, as int64."""
    bits = np.unpackbits(row[words].view(np.uint8), bitorder="little").view(np.bool_)
    found = np.flatnonzero(bits)
    ids = words[found >> 5] * WORD + (found & (WORD - 1))
    if len(ids) and ids[-1] >= vocab_size:
        # A copy: a slice would keep all of it alive.
        ids = ids[: np.searchsorted(ids, vocab_size)].copy()
    return ids


def allowed_ids(row: np.ndarray, vocab_size: int) -> np.ndarray:
    """The allowed ids below `vocab_size`, ascending, as int64. Only words with a bit set are looked into."""
    return ids_of(row, np.flatnonzero(row != 0), vocab_size)


def disallowed_ids(row: np.ndarray, vocab_size: int) -> np.ndarray:
    """The ids below `vocab_size` that are not allowed, ascending, as int64. Only words with a bit unset are looked into."""
    return ids_of(~row, np.flatnonzero(row != -1), vocab_size)


def fingerprints(rows: np.ndarray) -> list:
    """A 64-bit number for every row of a C-contiguous int32 [n, words], equal for equal rows.

    A random linear form, drawn anew in each process. It only finds candidates: callers compare the rows themselves, and
    need another way to tell apart rows that differ in the highest bits of words only, where it is weak: folding
    those bits down first would read the rows twice.
    """
    wide = rows.view(np.uint64) if rows.shape[1] % 2 == 0 else rows.view(np.uint32).astype(np.uint64)
    return np.einsum("ij,j->i", wide, _weights(wide.shape[1])).tolist()


@lru_cache(maxsize=16)
def _weights(width: int) -> np.ndarray:
    return np.frombuffer(secrets.token_bytes(8 * width), dtype=np.uint64) | np.uint64(1)
