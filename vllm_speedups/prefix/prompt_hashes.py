"""The block hashes of one prompt: Python's hashes of its prefixes, found together in linear time, and of what follows it."""

from __future__ import annotations

from collections.abc import Sequence

from .tuple_hash import extended, prefix_hashes, standing_for

# Below this many tokens hashing every prefix anew is faster than carrying one hash on.
_SHORT = 384


class PromptHashes:
    """Hashes of a prompt's full blocks, each with the prefix before it and an adapter's id, and of blocks that reach past it.

    `values[i]` is `hash((prefix, adapter))` of the first `(i + 1) * block_size` tokens. A prefix is a tuple of all tokens
    where `flat`, else what `get_prefix_token_ids` returns: `(prompt[:n], None)`, or `(prompt, output[:n])` past the prompt.
    """

    __slots__ = ("_whole", "adapter", "block_size", "flat", "prompt", "values")

    def __init__(self, prompt: tuple, block_size: int, adapter: int, flat: bool):
        self.prompt, self.block_size, self.adapter, self.flat = prompt, block_size, adapter, flat
        self._whole: int | None = None
        if len(prompt) < _SHORT:
            ends = range(block_size, len(prompt) + 1, block_size)
            self.values = [hash((prompt[:end] if flat else (prompt[:end], None), adapter)) for end in ends]
        else:
            self.values = prefix_hashes(prompt, block_size, *(() if flat else (None,)), adapter)

    def past_the_prompt(self, block: int, output: Sequence) -> int:
        """The hash of a block that the prompt does not fill; tokens that are not there yet are left out."""
        follows = tuple(output[: (block + 1) * self.block_size - len(self.prompt)])
        if self._whole is None:
            self._whole = hash(self.prompt)
        if not self.flat:
            return hash(((standing_for(self._whole), follows), self.adapter))
        prefix = extended(self._whole, len(self.prompt), follows)
        if prefix is None:
            return hash((self.prompt + follows, self.adapter))
        return hash((standing_for(prefix), self.adapter))
