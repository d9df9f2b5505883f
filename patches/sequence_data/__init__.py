"""Glue of `sequence-data`: the class for the release that is installed, and block hashes that are found together."""

from __future__ import annotations

import copy
import pickle
from array import array
from operator import attrgetter

from vllm_speedups.patching import Declined
from vllm_speedups.prefix.prompt_hashes import PromptHashes
from vllm_speedups.prefix.tuple_hash import exact
from vllm_speedups.telemetry import counters

from . import data

CLASS = f"{data.MODULE}:{data.NAME}"
TARGET = f"{data.MODULE}:Sequence.hash_of_block"
NUM_HASHED = f"{data.MODULE}:Sequence.num_hashed_tokens_of_block"


def build(context) -> dict:
    """Both replacements. Raises Declined where this Python hashes tuples in another way."""
    if not exact():
        raise Declined("this Python hashes tuples in a way that the patch does not know: it is for CPython of 64 bits")
    stock, form = context.stock[CLASS], context.form
    plain = form != "struct"
    made = data.plain(stock, listed=form == "list", copied=form == "array") if plain else data.struct(stock)
    return {CLASS: made, TARGET: _hash_of_block(context, form)}


def _hash_of_block(context, form: str):
    stock_hash, counts = context.stock[TARGET], counters("sequence-data")
    flat = form == "list"
    prompt_of = data.prompt_of_list if flat else attrgetter("_prompt_token_ids_tuple")
    outputs_of = attrgetter("output_token_ids" if form in ("list", "tuple") else "_output_token_ids")

    def first_seen(seq, prompt: tuple) -> PromptHashes:
        counts["prompts hashed"] += 1
        known = seq.data._block_hashes = PromptHashes(prompt, seq.block_size, seq.lora_int_id, flat)
        return known

    # Called for every block of every prompt, mostly to look a value up: no calls that are not needed (0.3 µs with the gate).
    def hash_of_block(self, logical_idx):
        held = self.data
        try:
            known = held._block_hashes
        except AttributeError:
            # Stock's own object, made before the patch was applied.
            return stock_hash(self, logical_idx)
        try:
            prompt = prompt_of(held)
            if (
                known is None
                or known.prompt is not prompt
                or known.block_size != self.block_size
                or known.adapter != (self.lora_int_id if self.lora_request else 0)
            ):
                known = first_seen(self, prompt)
            if 0 <= logical_idx < len(known.values):
                return known.values[logical_idx]
            if logical_idx >= 0:
                return known.past_the_prompt(logical_idx, outputs_of(held))
        except Exception as error:
            # Counted only where stock does not raise too.
            answer = stock_hash(self, logical_idx)
            context.failed(error)
            return answer
        return stock_hash(self, logical_idx)

    def verified(self, logical_idx):
        ours = hash_of_block(self, logical_idx)
        if not context.verifies():
            return ours
        stock = stock_hash(self, logical_idx)
        if ours != stock:
            facts = {"block": logical_idx, "block size": self.block_size, "stock": stock, "ours": ours}
            context.differed(facts, {"tokens": list(self.data.get_token_ids()), "adapter": self.lora_int_id})
        return stock

    return hash_of_block if context.verifies is None else verified


def probe(context, replacements) -> None:
    """Block hashes, tokens, copies and pickles of both classes, for prompts of several lengths that grow."""
    classes = context.stock[CLASS], replacements[CLASS]
    hashes = context.stock[TARGET], replacements[TARGET]
    for length, adapter in ((0, 0), (5, 0), (40, 3), (700, 0), (1100, 7)):
        tokens = [(position * position * 7919) % 140_000 for position in range(length)]
        sides = [_Sequence(context, hashed, _made(made, tokens), adapter) for made, hashed in zip(classes, hashes)]
        for step in range(3):
            if sides[0].seen() != sides[1].seen():
                raise Declined(f"its probe found another hash or other tokens than stock's, {length} tokens and {step} more")
            for side in sides:
                side.data.append_token_id(17 + step, -0.5)
        ours = sides[1]
        for name, copied in (("copy", copy.deepcopy(ours.data)), ("pickle", pickle.loads(pickle.dumps(ours.data)))):
            if _Sequence(context, hashes[1], copied, adapter).seen() != ours.seen():
                raise Declined(f"its probe found other tokens in a {name} than in what was copied")


class _Sequence:
    """As much of vLLM's class as `hash_of_block` asks for."""

    block_size = 16

    def __init__(self, context, hash_of_block, held, adapter: int):
        self.data, self.lora_request, self.lora_int_id, self._hash_of_block = held, adapter, adapter, hash_of_block
        self._num_hashed_tokens_of_block = context.stock[NUM_HASHED]

    def num_hashed_tokens_of_block(self, logical_idx: int) -> int:
        return self._num_hashed_tokens_of_block(self, logical_idx)

    def seen(self) -> tuple:
        """All that is compared."""
        held = self.data
        blocks = held.get_len() // self.block_size + 2
        hashes = [self._hash_of_block(self, block) for block in range(blocks)]
        return hashes, held.output_token_ids, held.get_token_ids(), held.prompt_token_ids, repr(held)


def _made(made: type, tokens: list):
    return made(array("l", tokens) if hasattr(made, "__struct_fields__") else list(tokens))
