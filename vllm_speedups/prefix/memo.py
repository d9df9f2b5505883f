"""The prefix memo: a radix tree of token prefixes whose digests were computed before, within a byte budget."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from .records import BYTES, shared

# What a remembered digest costs beside its tokens: a bytes object of 32 bytes and its place in a list.
_DIGEST_BYTES = 88
# An edge: the object, its list, dictionary and bytes objects, its places in the tree and in the order of use. A test
# holds the sum of all three to what tracemalloc measures.
_EDGE_BYTES = 420


class _Edge:
    """Consecutive blocks that were always seen together, and what has followed them. A tree's root is an empty one."""

    __slots__ = ("children", "digests", "first", "parent", "records")

    def __init__(self, parent: _Edge | None, first: Any, records: bytes, digests: list):
        self.parent = parent
        # The key under which the parent holds this edge: the records of its first block, or for a root the tree's key.
        self.first = first
        self.records = records
        self.digests = digests
        self.children: dict = {}


class PrefixMemo:
    """Digests of block prefixes, found again by comparing every token with the remembered ones.

    A tree's `key`, a tuple, must determine together with a block's tokens and what precedes it in the tree that block's
    digest: algorithm, block size, the digest that the first block is chained to, the extra keys as serialised. Tokens
    come as records (see `records`) and are compared as such, in full. `budget` is in bytes; the least recently used
    prefixes go first, from their ends. Thread-safe.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.nbytes = 0
        self._lock = threading.Lock()
        self._trees: dict = {}
        # Edges, least recently used first. None is ever younger than the one it follows, so the oldest is a leaf.
        self._used: OrderedDict = OrderedDict()

    def find(self, key: tuple, data: bytes, begin: int, block_size: int, blocks: int) -> list:
        """The digests of the longest remembered prefix of the `blocks` blocks whose records begin at byte `begin`.

        The caller sees to it that the bytes before `begin` are intact (`records.intact`). Those of the prefix that is
        found are then intact as well, since only intact ones are remembered.
        """
        digests: list = []
        with self._lock:
            tree = self._trees.get(key)
            if tree is not None:
                edge, _ = self._descend(tree, data, begin, BYTES * block_size, blocks, digests)
                self._touch(edge)
        return digests

    def remember(self, key: tuple, data: bytes, begin: int, block_size: int, digests: list) -> int:
        """Remember the digests of the blocks whose records, which must be intact, begin at byte `begin`.

        What is larger than the budget is remembered as far as it fits. Returns how many edges were forgotten for it.
        """
        width = BYTES * block_size
        fits = (self.budget - 2 * _EDGE_BYTES - _key_bytes(key) - width) // (width + _DIGEST_BYTES)
        digests = digests[: max(0, fits)]
        if not digests:
            return 0
        with self._lock:
            tree = self._trees.get(key)
            if tree is None:
                tree = self._trees[key] = _Edge(None, key, b"", [])
                self.nbytes += _cost(tree)
            known: list = []
            edge, matched = self._descend(tree, data, begin, width, len(digests), known)
            if len(known) < len(digests):
                if matched < len(edge.digests):
                    edge = self._split(edge, matched, width)
                begin, end = begin + len(known) * width, begin + len(digests) * width
                edge = self._grow(edge, data[begin:end], digests[len(known) :], width)
            self._touch(edge)
            return self._shrink()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._trees.clear()
            self._used.clear()
            self.nbytes = 0

    def __len__(self) -> int:
        """How many edges are remembered."""
        return len(self._used)

    @staticmethod
    def _descend(edge: _Edge, data: bytes, begin: int, width: int, blocks: int, digests: list) -> tuple:
        """Follow the data from a root as far as it is known, collecting digests.

        Returns the last edge that was entered and how many of its blocks match: all of them unless the data ends or
        departs inside it.
        """
        end = begin + blocks * width
        matched = len(edge.digests)
        while begin < end and matched == len(edge.digests):
            child = edge.children.get(data[begin : begin + width])
            if child is None:
                break
            edge = child
            matched = min(shared(edge.records, data, begin), end - begin) // width
            digests += edge.digests[:matched]
            begin += matched * width
        return edge, matched

    def _split(self, edge: _Edge, blocks: int, width: int) -> _Edge:
        """Give the first `blocks` blocks of an edge an edge of their own, and return that."""
        cut = blocks * width
        upper = _Edge(edge.parent, edge.first, edge.records[:cut], edge.digests[:blocks])
        edge.parent.children[edge.first] = upper
        edge.parent, edge.first = upper, edge.records[cut : cut + width]
        edge.records, edge.digests = edge.records[cut:], edge.digests[blocks:]
        upper.children[edge.first] = edge
        self._used[upper] = None
        self.nbytes += _EDGE_BYTES + width
        return upper

    def _grow(self, edge: _Edge, records: bytes, digests: list, width: int) -> _Edge:
        """Append blocks behind an edge: to the edge itself where nothing follows it yet, as a new one otherwise."""
        before = 0
        if edge.parent is not None and not edge.children:
            before = _cost(edge)
            edge.records += records
            edge.digests += digests
        else:
            first = records[:width]
            edge.children[first] = edge = _Edge(edge, first, records, digests)
            self._used[edge] = None
        self.nbytes += _cost(edge) - before
        return edge

    def _touch(self, edge: _Edge) -> None:
        while edge.parent is not None:
            self._used.move_to_end(edge)
            edge = edge.parent

    def _shrink(self) -> int:
        forgotten = 0
        while self.nbytes > self.budget and self._used:
            edge, _ = self._used.popitem(last=False)
            parent = edge.parent
            del parent.children[edge.first]
            self.nbytes -= _cost(edge)
            forgotten += 1
            if parent.parent is None and not parent.children:
                del self._trees[parent.first]
                self.nbytes -= _cost(parent)
        return forgotten


def _cost(edge: _Edge) -> int:
    own = _key_bytes(edge.first) if edge.parent is None else len(edge.first)
    return _EDGE_BYTES + own + len(edge.records) + _DIGEST_BYTES * len(edge.digests)


def _key_bytes(key: tuple) -> int:
    return sum(len(part) for part in key if isinstance(part, bytes))
