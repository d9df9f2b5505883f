"""The hash algorithms that vLLM offers for prefix caching, by the names it gives them."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any, Callable, NamedTuple


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


class Algorithm(NamedTuple):
    """How a block's message is written and hashed.

    Of `new` (a hashlib constructor) and `digest` (bytes in, bytes out) exactly one is set: a lambda around the former
    would cost a tenth of a long prompt's hashing time.
    """

    name: str
    encode: Callable[[Any], bytes]
    new: Callable | None
    digest: Callable[[bytes], bytes] | None
    digest_size: int

    @property
    def canonical_cbor(self) -> bool:
        """Whether messages are written as canonical CBOR (RFC 8949); pickled at the highest protocol otherwise."""
        return self.encode is not _pickled

    def hash(self, value: Any) -> bytes:
        """The digest of one value, written and hashed the way vLLM's function of the same name does it."""
        message = self.encode(value)
        return self.digest(message) if self.new is None else self.new(message).digest()


def find(name: str) -> Algorithm | None:
    """The algorithm that vLLM calls `name`, or None where it is unknown or what it needs is not installed."""
    encode = _pickled
    try:
        if name.endswith("_cbor"):
            from cbor2 import dumps

            def encode(value: Any) -> bytes:
                return dumps(value, canonical=True)

        if name in ("sha256", "sha256_cbor"):
            return Algorithm(name, encode, hashlib.sha256, None, 32)
        if name in ("xxhash", "xxhash_cbor"):
            from xxhash import xxh3_128_digest

            return Algorithm(name, encode, None, xxh3_128_digest, 16)
    except ImportError:
        pass
    return None
