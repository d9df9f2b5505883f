"""The bytes of many blocks' messages at once, exactly as pickle or canonical CBOR writes them one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from .algorithms import Algorithm
from .records import BYTES, values

# pickle opens a new frame past 64 KiB; such blocks take the plain path, as do CBOR ones of that size, for symmetry.
_LARGEST_MESSAGE = 60_000
_PICKLE_OPCODES = np.frombuffer(b"KMJ", np.uint8)  # BININT1, BININT2, BININT
_CBOR_HEADS = np.array([0, 24, 25, 26], np.uint8)  # none, and one, two or four bytes follow
# The tail is written an octet at a time, for all blocks: past this many, block by block is faster.
_LONGEST_TAIL = 200
# How far outside its row a token may write zeros.
_MARGIN = 4


class Layout:
    """How one algorithm writes `(parent digest, tuple of block_size token ids, extra keys)`.

    A message is a head, the parent's digest, and a body: the token ids between two constants. The second constant,
    `tail`, holds the extra keys, serialised; equal tails mean equal messages for equal parents and tokens, which is
    more than equal extra keys mean: pickle writes an object that occurs twice differently from two equal objects.
    """

    __slots__ = ("_cbor", "_digest_size", "block_size", "bulk", "heads", "opening", "tail")

    def __init__(self, algorithm: Algorithm, block_size: int, opening: bytes, tail: bytes):
        self.block_size = block_size
        self.opening = opening
        self.tail = tail
        self.bulk = len(tail) <= _LONGEST_TAIL  # whether `bodies` is worthwhile
        self._cbor = algorithm.canonical_cbor
        self._digest_size = algorithm.digest_size
        # By the size of the body; filled when bodies are first laid out.
        self.heads: list = []

    def bodies(self, data: bytes, begin: int, blocks: int) -> list | None:
        """The bodies of `blocks` consecutive blocks whose records (`records.pack`) begin at byte `begin`.

        None where a token cannot be written this way.
        """
        tokens = values(data, begin, blocks * self.block_size)
        largest = int(tokens.max())
        if self._cbor and largest >= 2**31:
            return None
        wide = (tokens > 0xFF).view(np.uint8)
        widest = (tokens > 0xFFFF).view(np.uint8)
        octets = tokens.view(np.uint8).reshape(-1, 4)
        # Every token writes all its octets, as if all were as wide as the widest, the most significant first. What a
        # narrow one writes too much is zeros, where another token, the tail or the padding is still to be.
        needed = [octet for octet in (3, 2, 1, 0) if largest >> (8 * octet) or octet == 0]
        if self._cbor:
            kind = (tokens > 23).view(np.uint8) + wide + widest
            sizes = kind + widest + np.uint8(1)
            starts, ends, out = self._places(sizes, blocks)
            last = starts + (sizes - np.uint8(1))
            for octet in needed:
                out[_MARGIN - octet :][last] = np.ascontiguousarray(octets[:, octet])
            out[_MARGIN:][starts] = np.where(kind == 0, octets[:, 0], _CBOR_HEADS.take(kind))
        else:
            kind = wide + widest
            starts, ends, out = self._places(kind + widest + np.uint8(2), blocks)
            for octet in needed:
                out[_MARGIN + 1 + octet :][starts] = np.ascontiguousarray(octets[:, octet])
            out[_MARGIN:][starts] = _PICKLE_OPCODES.take(kind)
        for place, octet in enumerate(self.tail, _MARGIN):
            out[place:][ends] = octet
        rows = out[_MARGIN : _MARGIN + blocks * self._pitch].reshape(blocks, self._pitch)
        rows[:, : len(self.opening)] = np.frombuffer(self.opening, np.uint8)
        if not self.heads:
            self._fill_heads()
        # NumPy takes the padding off such strings: zeros at their end, and no body ends in one (see `layout`).
        return rows.view(f"S{self._pitch}").ravel().tolist()

    @property
    def _pitch(self) -> int:
        """The size of the longest body, in bytes."""
        return len(self.opening) + BYTES * self.block_size + len(self.tail)

    def _places(self, sizes: np.ndarray, blocks: int) -> tuple:
        """Where tokens of `sizes` bytes go, in rows of `_pitch` bytes: (starts int64 [tokens], ends of the last ones
        int64 [blocks], a zeroed uint8 buffer with `_MARGIN` bytes before and behind the rows)."""
        pitch = self._pitch
        starts = np.cumsum(sizes.astype(np.int64))
        starts -= sizes
        by_block = starts.reshape(blocks, self.block_size)
        first = np.arange(len(self.opening), blocks * pitch, pitch)
        by_block += (first - by_block[:, 0])[:, None]
        ends = by_block[:, -1] + sizes[self.block_size - 1 :: self.block_size]
        return starts, ends, np.zeros(blocks * pitch + 2 * _MARGIN, np.uint8)

    def _fill_heads(self) -> None:
        if self._cbor:
            self.heads = [b"\x83" + _cbor_length(0x40, self._digest_size)] * (self._pitch + 1)
        else:
            self.heads = [_pickle_head(self._digest_size, size) for size in range(self._pitch + 1)]


def layout(algorithm: Algorithm, block_size: int, extra_keys: Any) -> Layout | None:
    """The layout for blocks of `block_size` tokens that all have these extra keys.

    It is read off a sample message written by the algorithm itself; None where that does not look as expected, so that
    another Python or another cbor2 costs speed, never a wrong digest. None also where messages would be too large, or
    end in a zero, as CBOR with an integer zero for the last extra key does.
    """
    if block_size < 1:
        return None
    parent, tokens = bytes(algorithm.digest_size), (0,) * block_size
    sample = algorithm.encode((parent, tokens, extra_keys))
    if len(sample) + BYTES * block_size > _LARGEST_MESSAGE:
        return None
    if algorithm.canonical_cbor:
        head = b"\x83" + _cbor_length(0x40, algorithm.digest_size)
        opening, closing, token = _cbor_length(0x80, block_size), b"", b"\x00"
    else:
        head = _pickle_head(algorithm.digest_size, len(sample) - len(_pickle_head(0, 0)) - algorithm.digest_size)
        # Up to three items a tuple is written without a mark: TUPLE1, TUPLE2, TUPLE3.
        opening = b"\x94" if block_size <= 3 else b"\x94("
        closing, token = (b"t", b"\x85", b"\x86", b"\x87")[block_size if block_size <= 3 else 0] + b"\x94", b"K\x00"
    before = head + parent + opening + token * block_size
    if not sample.startswith(before + closing) or sample.endswith(b"\0"):
        return None
    return Layout(algorithm, block_size, opening, sample[len(before) :])


def _pickle_head(digest_size: int, body_size: int) -> bytes:
    """PROTO 5, a FRAME, and the beginning of SHORT_BINBYTES."""
    frame = 2 + digest_size + body_size
    return b"\x80\x05\x95" + frame.to_bytes(8, "little") + b"C" + bytes([digest_size])


def _cbor_length(major: int, length: int) -> bytes:
    """The head of a CBOR byte string (`major` 0x40) or array (0x80) of some length below 2**16."""
    if length < 24:
        return bytes([major | length])
    if length < 2**8:
        return bytes([major | 24, length])
    return bytes([major | 25]) + length.to_bytes(2, "big")
