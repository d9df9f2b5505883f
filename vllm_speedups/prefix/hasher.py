"""Chained block hashes of a growing token prefix: each block the cheapest way, and what was hashed before looked up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .algorithms import Algorithm
from .layout import Layout, layout
from .memo import PrefixMemo
from .records import BYTES, FIRST, intact, pack, works

# Where the ways cross over, in tokens: laying out in bulk costs some 100 µs whatever the length, the memo some 10.
_BULK_TOKENS = 4096
_MEMO_TOKENS = 384
# Bodies are laid out about this many tokens at a time, to stay within the CPU's second-level cache.
_CHUNK_TOKENS = 32_768


class PrefixHasher:
    """Hashes blocks of `block_size` tokens, each chained to the one before, as vLLM's `hash_block_tokens` does.

    `memo` may be shared by hashers and threads; without one, or with a budget of none, everything is computed. `counts`
    is a dictionary of numbers, to which is added what was done.
    """

    def __init__(self, algorithm: Algorithm, block_size: int, memo: PrefixMemo | None, counts: dict):
        self.algorithm = algorithm
        self.block_size = block_size
        self.memo = memo if memo is not None and memo.budget > 0 else None
        self.counts = counts
        self._plain = layout(algorithm, block_size, None) if works() else None
        # How many blocks must come together for more than hashing them singly to be worthwhile.
        self._bulk = max(2, _BULK_TOKENS // block_size)
        self.worthwhile = self._bulk if self.memo is None else max(2, _MEMO_TOKENS // block_size)

    def extend(self, tokens: list, start: int, runs: Iterable[tuple], parent: bytes) -> list:
        """The digests of the blocks from token `start` on.

        `tokens` is the whole prefix from its first token on. `runs` holds (number of blocks, extra keys that each of
        them has), in order. `parent` is the digest of the block before `start`, or what stands in for one.
        """
        digests: list = []
        data, skipped, checked = None, -1, FIRST
        hash_value, size, single = self.algorithm.hash, self.block_size, 0
        for blocks, extra_keys in runs:
            if blocks == 1:
                # Inside of media every block has keys of its own: as few steps as stock takes.
                parent = hash_value((parent, tuple(tokens[start : start + size]), extra_keys))
                digests.append(parent)
                start += size
                single += 1
                continue
            shape = self._shape(blocks, extra_keys)
            if shape is not None and skipped < 0:
                # Copying costs a fifth of packing, so a short beginning is packed although nobody looks at it.
                skipped = start if 4 * start > len(tokens) else 0
                data = pack(tokens[skipped:] if skipped else tokens)
            new = None
            if shape is not None and data is not None:
                # Records can be trusted only where all before them are intact too; each is looked at once.
                begin = FIRST + BYTES * (start - skipped)
                if intact(data, checked, begin):
                    new, checked = self._together(tokens, start, blocks, extra_keys, parent, shape, data, begin)
                else:
                    data = None
            if new is None:
                new = self.singly(tokens, start, blocks, extra_keys, parent)
            digests += new
            parent = new[-1]
            start += blocks * size
        self.counts["misses"] += single
        return digests

    def _shape(self, blocks: int, extra_keys: Any) -> Layout | None:
        if blocks < self.worthwhile or self._plain is None:
            return None
        return self._plain if extra_keys is None else layout(self.algorithm, self.block_size, extra_keys)

    def _together(self, tokens, start, blocks, extra_keys, parent, shape, data, begin) -> tuple:
        """A run of blocks with equal extra keys: looked up as far as remembered, then hashed and remembered.

        Its records begin at byte `begin`, and all before are intact. (digests, the byte up to which records are intact)
        """
        width = BYTES * self.block_size
        end = begin + blocks * width
        key = (self.algorithm.name, self.block_size, parent, shape.tail)
        digests = [] if self.memo is None else self.memo.find(key, data, begin, self.block_size, blocks)
        found = len(digests)
        self.counts["hits"] += found
        if found == blocks:
            return digests, end
        parent = digests[-1] if digests else parent
        fresh = begin + found * width
        sound = intact(data, fresh, end)
        rest = None
        if sound and shape.bulk and blocks - found >= self._bulk:
            rest = self._in_bulk(shape, data, fresh, blocks - found, parent)
        if rest is None:
            rest = self.singly(tokens, start + found * self.block_size, blocks - found, extra_keys, parent)
        else:
            self.counts["misses"] += len(rest)
        digests += rest
        if sound and self.memo is not None:
            forgotten = self.memo.remember(key, data, begin, self.block_size, digests)
            if forgotten:
                self.counts["evictions"] += forgotten
        return digests, end if sound else fresh

    def _in_bulk(self, shape: Layout, data: bytes, begin: int, blocks: int, parent: bytes) -> list | None:
        """Hash blocks whose bodies are laid out all at once. None where they cannot be."""
        if len(parent) != self.algorithm.digest_size:
            return None
        digests: list = []
        new, digest = self.algorithm.new, self.algorithm.digest
        step = max(1, _CHUNK_TOKENS // self.block_size)
        for first in range(0, blocks, step):
            count = min(step, blocks - first)
            bodies = shape.bodies(data, begin + first * self.block_size * BYTES, count)
            if bodies is None:
                return None
            heads = shape.heads
            # Two concatenations beat b"".join, a % format, and one buffer with holes for the digests.
            if new is not None:
                digests += [parent := new(heads[len(body)] + parent + body).digest() for body in bodies]
            else:
                digests += [parent := digest(heads[len(body)] + parent + body) for body in bodies]
        return digests

    def singly(self, tokens: list, start: int, blocks: int, extra_keys: Any, parent: bytes) -> list:
        """Hash blocks one by one, exactly as vLLM writes them, less its calls. Arguments as for `extend`."""
        hash_value, size = self.algorithm.hash, self.block_size
        self.counts["misses"] += blocks
        if blocks == 1:
            return [hash_value((parent, tuple(tokens[start : start + size]), extra_keys))]
        remaining = iter(tokens[start : start + blocks * size])
        return [parent := hash_value((parent, block, extra_keys)) for block in zip(*[remaining] * size)]
