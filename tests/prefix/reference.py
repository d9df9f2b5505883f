"""Block hashing written out plainly, for the library to agree with: pickle or CBOR, then the hash, block by block."""

from __future__ import annotations

import hashlib
import pickle
from concurrent.futures import ThreadPoolExecutor

import cbor2
import xxhash

NAMES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def message(name: str, parent: bytes, tokens: tuple, extra_keys) -> bytes:
    value = (parent, tokens, extra_keys)
    if name.endswith("_cbor"):
        return cbor2.dumps(value, canonical=True)
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def digest(name: str, written: bytes) -> bytes:
    return hashlib.sha256(written).digest() if name.startswith("sha256") else xxhash.xxh3_128_digest(written)


def chain(name: str, block_size: int, tokens: list, start: int, runs, parent: bytes) -> list:
    digests = []
    for blocks, extra_keys in runs:
        for _ in range(blocks):
            block = tuple(tokens[start : start + block_size])
            parent = digest(name, message(name, parent, block, extra_keys))
            digests.append(parent)
            start += block_size
    return digests


def in_two_threads(work) -> None:
    """Run `work(0)` and `work(1)` at the same time, and raise what either raised."""
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work, seed) for seed in range(2)]:
            done.result()
