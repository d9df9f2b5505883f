"""Token ids as fixed-width records: the form in which they are compared, remembered and handed to NumPy."""

from __future__ import annotations

import marshal
from collections.abc import Sequence

import numpy as np

# `marshal` writes a plain int that fits 32 bits as b"i" and four little-endian bytes, and a list as b"[", its length
# and its items. It is the fastest type-exact reading of a list that CPython has: 11 ns a token, against 20 to 25 for
# NumPy and array.array, which moreover read True as 1 while pickle and CBOR do not. (`struct` takes 9, and does too.)
BYTES = 5
FIRST = 5
_VERSION = 2


def pack(tokens: Sequence[int]) -> bytes | None:
    """The records of a list of token ids: the one of token i begins at byte `FIRST + BYTES * i`.

    None where some element is evidently not a plain 32-bit int. Whoever reads on calls `intact` for what they read.
    """
    try:
        data = marshal.dumps(tokens, _VERSION)  # type: ignore[arg-type]
    except ValueError:
        return None
    return data if len(data) == FIRST + BYTES * len(tokens) else None


def intact(data: bytes, begin: int, end: int) -> bool:
    """Whether bytes `begin` to `end` are records of plain ints, provided that all before `begin` are."""
    return data[begin:end:BYTES].count(b"i") * BYTES == end - begin


def values(data: bytes, begin: int, count: int) -> np.ndarray:
    """`count` token ids, one or more, from byte `begin` on: uint32 [count]. Negative ids appear as 2**32 + id."""
    return np.ndarray((count,), "<u4", data, begin + 1, (BYTES,)).copy()


def shared(one: bytes, other: bytes, begin: int) -> int:
    """How many leading bytes of `one` equal those of `other` from `begin` on."""
    if other.startswith(one, begin):
        return len(one)
    size = min(len(one), len(other) - begin)
    differs = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size, begin)
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def works() -> bool:
    """Whether this Python's `marshal` writes records as described above."""
    sample = [0, 1, 255, 65536, 2**31 - 1, -1]
    expected = b"[" + len(sample).to_bytes(4, "little")
    expected += b"".join(b"i" + (token % 2**32).to_bytes(4, "little") for token in sample)
    return pack(sample) == expected and pack([2**31]) is None and pack([True]) is None
