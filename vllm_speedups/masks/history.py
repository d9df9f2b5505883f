"""Rows under the exact tokens accepted, for matchers that show no state: the same tokens lead to the same row."""

from __future__ import annotations

from .trail import numbers

MAX_NODES = 1 << 16


class Node:
    """One sequence of accepted tokens. `number` is its id, unique in this process; `cost` is the owner's to use."""

    __slots__ = ("children", "cost", "number")

    def __init__(self) -> None:
        self.number = next(numbers)
        self.cost = 0.0
        self.children: dict | None = None


class History:
    """All the sequences that requests of one compiled grammar went through, as a trie. Thread-safe.

    Past `limit` nodes a new trie is begun. Whoever stands in the old one walks on there, and its numbers stay unique.
    """

    def __init__(self, limit: int = MAX_NODES):
        self.limit = limit
        self.nodes = 1
        self.initial = Node()

    def __len__(self) -> int:
        return self.nodes

    @property
    def nbytes(self) -> int:
        """Bytes held, roughly."""
        return 400 * self.nodes

    def follow(self, node: Node, token: int) -> Node:
        """The node after one more accepted token."""
        children = node.children
        if children is not None:
            child = children.get(token)
            if child is not None:
                return child
        else:
            children = node.children = node.children or {}
        # Of two threads that make the same child at once, both go on with the one that was first.
        child = children.setdefault(token, Node())
        self.nodes += 1
        if self.nodes > self.limit:
            self.nodes, self.initial = 1, Node()
        return child
