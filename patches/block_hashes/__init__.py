"""Glue of `block-hashes`: vLLM's request block hasher over `vllm_speedups.prefix`, one memo a process."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from types import SimpleNamespace

from vllm_speedups import settings
from vllm_speedups.patching import Declined
from vllm_speedups.prefix import PrefixHasher, PrefixMemo, find
from vllm_speedups.telemetry import counters, gauge

MODULE = "vllm.v1.core.kv_cache_utils"
TARGET = f"{MODULE}:get_request_block_hasher"
EXTRA_KEYS = f"{MODULE}:generate_block_hash_extra_keys"
# Where hash functions are at home; until 0.11.0 in the second.
HASHING = ("vllm.utils.hashing", "vllm.utils")
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def build(context) -> dict:
    """The factory of hashers, around one memo of VLLM_SPEEDUPS_PREFIX_MEMO_MB."""
    memo = PrefixMemo(int(settings.current().prefix_memo_mb * 2**20))
    gauge("block-hashes", "bytes", lambda: memo.nbytes)
    return {TARGET: _factory(context, memo, counters("block-hashes"))}


def hash_function(stock, name: str):
    """vLLM's own hash function of that name, or None where it has none."""
    return next((stock[path] for path in (f"{home}:{name}" for home in HASHING) if path in stock), None)


def _factory(context, memo, counts):
    stock_factory = context.stock[TARGET]
    signature = inspect.signature(stock_factory)
    functions = [(name, hash_function(context.stock, name)) for name in ALGORITHMS]

    def get_request_block_hasher(*args, **kwargs):
        stock_hasher = stock_factory(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments.values()
            # A third argument, from 0.33 on, is a number of tokens to look ahead: then each block has keys of its own.
            block_size, hash_function, *lookahead = given
            name = next((name for name, function in functions if function is hash_function), None)
            algorithm = find(name) if name and not any(lookahead) else None
            if algorithm is None:
                counts["hashers left to stock"] += 1
                return stock_hasher
            return _hasher(context, PrefixHasher(algorithm, block_size, memo, counts), stock_hasher)
        except Exception as error:
            context.failed(error)
            return stock_hasher

    return get_request_block_hasher


def _hasher(context, hasher: PrefixHasher, stock_hasher):
    block_size = hasher.block_size
    extend = _extender(context, hasher, stock_hasher)

    # Called for every token of every request, mostly for nothing: kept as small as stock's, down to its free variables.
    def request_block_hasher(request):
        start = len(request.block_hashes) * block_size
        num_tokens = request.num_tokens
        if start + block_size > num_tokens:
            return []
        return extend(request, start, num_tokens)

    return request_block_hasher


def _extender(context, hasher: PrefixHasher, stock_hasher):
    """What hashes the full blocks of a request from token `start` on. Never raises what stock would not."""
    module = sys.modules[MODULE]
    constant_list = context.stock.get("vllm.v1.utils:ConstantList")
    extra_keys = context.stock[EXTRA_KEYS]
    block_size, counts = hasher.block_size, hasher.counts
    live, verifies = context.live, context.verifies

    def extend(request, start, num_tokens):
        # A hasher outlives the revert of the patch.
        if not live():
            return stock_hasher(request)
        if verifies is None or not verifies():
            return hashed(request, start, num_tokens)
        ours, stock = hashed(request, start, num_tokens), stock_hasher(request)
        if ours != stock:
            _tell(context, hasher, request, start, ours, stock)
        return stock

    def hashed(request, start, num_tokens):
        try:
            blocks = (num_tokens - start) // block_size
            known, tokens = request.block_hashes, request.all_token_ids
            parent = (known[-1] if known else None) or module.NONE_HASH
            # vLLM's read-only view; a slice of it would copy the whole prompt.
            tokens = tokens._x if type(tokens) is constant_list else tokens
            if request.mm_features or request.prompt_embeds is not None:
                runs = _runs_with_media(request, start, blocks, block_size, extra_keys)
            elif request.lora_request or request.cache_salt:
                runs = _runs(request, start, blocks, block_size, extra_keys)
            elif blocks < hasher.worthwhile:
                return hasher.singly(tokens, start, blocks, None, parent)
            else:
                runs = ((blocks, None),)
            if runs is not None:
                return hasher.extend(tokens, start, runs, parent)
            counts["requests left to stock"] += 1
        except Exception as error:
            # Counted only where stock does not raise too.
            digests = stock_hasher(request)
            context.failed(error)
            return digests
        return stock_hasher(request)

    return extend


def _tell(context, hasher: PrefixHasher, request, start: int, ours: list, stock: list) -> None:
    """Report hashes, from token `start` on, that are not stock's."""
    first = next((at for at, pair in enumerate(zip(ours, stock)) if pair[0] != pair[1]), min(len(ours), len(stock)))
    kinds = [name for name in ("lora_request", "cache_salt", "mm_features", "prompt_embeds") if _given(request, name)]
    facts = {
        "algorithm": hasher.algorithm.name,
        "block size": hasher.block_size,
        "hashes from token": start,
        "hashes": {"stock": len(stock), "ours": len(ours)},
        "first that differs": first,
        "request has": kinds or "tokens only",
    }
    private = {"tokens": list(request.all_token_ids), **{name: _given(request, name) for name in kinds}}
    hashes = {"stock": [digest.hex() for digest in stock], "ours": [digest.hex() for digest in ours]}
    context.differed(facts, {**private, "all hashes": hashes})


def _given(request, name: str):
    value = getattr(request, name, None)
    return value if value is not None and not (isinstance(value, (list, tuple)) and not value) else None


def _runs(request, start: int, blocks: int, block_size: int, extra_keys) -> list:
    """(blocks, extra keys) of a request without media: only a prompt's first block, with the salt, may differ."""
    keys, _ = extra_keys(request, start, start + block_size, 0)
    if start or blocks == 1:
        return [(blocks, keys)]
    rest, _ = extra_keys(request, block_size, 2 * block_size, 0)
    return [(1, keys), (blocks - 1, rest)]


def _runs_with_media(request, start: int, blocks: int, block_size: int, extra_keys):
    """(blocks, extra keys) of a request with media; None where stock has to do it.

    That is with prompt embeddings, which give every block keys of its own, and where hashing resumes before the last
    item has ended, where releases differ in the item they resume at.
    """
    if request.prompt_embeds is not None:
        return None
    features = request.mm_features
    last = features[-1].mm_position
    # Some releases still give an item's keys to a block that begins right behind it: hence "not past", not "before".
    media_end = int(last.offset) + int(last.length)
    if start > media_end:
        return _runs(request, start, blocks, block_size, extra_keys)
    return None if start else _runs_from_the_start(request, blocks, block_size, extra_keys, media_end)


def _runs_from_the_start(request, blocks: int, block_size: int, extra_keys, media_end: int):
    """Yields (blocks, extra keys) of a request with media that end at token `media_end`."""
    features = request.mm_features
    block = item = first = 0
    seen = None
    while block < blocks:
        begin = block * block_size
        if item != seen:
            # The block in which item `item` begins: up to there blocks are alike.
            seen = item
            first = int(features[item].mm_position.offset) // block_size if item < len(features) else blocks
        alike = 1
        if begin > media_end:
            alike = blocks - block
        elif first > block > 0:
            # The first block stands alone, for the salt.
            alike = min(first, blocks) - block
        keys, item = extra_keys(request, begin, begin + block_size, item)
        yield alike, keys
        block += alike


def probe(context, replacements) -> None:
    """A plain, an adapted and salted, and an illustrated request, new and grown, under every algorithm, twice over."""
    block_size = 16
    tokens = [(position * position * 7919) % 140_000 for position in range(280 * block_size)]
    factory = _factory(context, PrefixMemo(2**20), defaultdict(int))
    position = SimpleNamespace(offset=70, length=50)
    kinds = (
        {},
        {"lora_request": SimpleNamespace(lora_name="probe", lora_path="adapter", lora_int_id=1), "cache_salt": "salt"},
        {"mm_features": [SimpleNamespace(identifier="probe", mm_position=position)], "cache_salt": "salt"},
    )
    seeded = hasattr(sys.modules[MODULE], "NONE_HASH")
    for name in ALGORITHMS:
        function, algorithm = hash_function(context.stock, name), find(name)
        if function is None or algorithm is None:
            continue
        stock, ours = context.stock[TARGET](block_size, function), factory(block_size, function)
        known = [] if seeded else [algorithm.hash("probe")]
        for kind, length in [(kinds[0], len(tokens)), *((kind, size) for kind in kinds for size in (520, 560))]:
            request = _request(tokens[:length], list(known), **kind)
            expected = stock(request)
            if ours(request) != expected:
                raise Declined(f"its probe found other {name} hashes than stock's, with {sorted(kind) or 'no keys'}")
            request.block_hashes = known + expected[:-1]
            if ours(request) != expected[-1:]:
                raise Declined(f"its probe found another {name} hash than stock's for a request that grows")


def _request(tokens: list, block_hashes: list, **kind) -> SimpleNamespace:
    plain = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None}
    return SimpleNamespace(all_token_ids=tokens, num_tokens=len(tokens), block_hashes=block_hashes, **{**plain, **kind})
