"""Glue of `fsm-masks`: the outlines logits processors of the V0 engine."""

from __future__ import annotations

import sys
from collections import defaultdict

import torch

from vllm_speedups import settings
from vllm_speedups.masks.guides import GuideCache, index_bytes, table_bytes
from vllm_speedups.patches.processors import Shape, automaton, make_call, walk
from vllm_speedups.patching import Declined
from vllm_speedups.telemetry import counters

MODULE = "vllm.model_executor.guided_decoding.outlines_logits_processors"
CALL = "BaseLogitsProcessor.__call__"
COMPILE = "RegexLogitsProcessor._get_guide"

SHAPES = {
    "automata": Shape("fsm", "fsm_state", lambda processor: processor.init_state(), guide_class="RegexFSM"),
    "guides": Shape("_guide", "_fsm_state"),
    "guides, reasoner": Shape("_guide", "_fsm_state", filters=True, content="extract_content"),
    "guides, reasoning parser": Shape("_guide", "_fsm_state", filters=True, content="extract_content_ids"),
}


def build(context) -> dict:
    """`BaseLogitsProcessor.__call__` and, where stock does not keep compiled guides in memory, what compiles them."""
    counts = counters("fsm-masks")
    replacements = {}
    for path, stock in context.stock.items():
        module, _, name = path.partition(":")
        if name == CALL:
            replacements[path] = make_call(context, stock, SHAPES[context.form], sys.modules[module], counts)
        elif name == COMPILE:
            replacements[path] = _compile(stock, counts, context.failed)
    return replacements


def _compile(stock: classmethod, counts: dict, failed) -> classmethod:
    budget = int(settings.current().guide_cache_mb * 2**20)

    def size(guide):
        try:
            return _size(guide)
        except Exception as error:
            failed(error)
            return budget + 1

    cache = GuideCache(budget, size, counts)

    def _get_guide(cls, regex_string, tokenizer):
        return cache.get((cls, regex_string, tokenizer), lambda: stock.__func__(cls, regex_string, tokenizer))

    return classmethod(_get_guide)


def _size(guide) -> int:
    """What a compiled guide holds, in bytes, roughly."""
    maps = guide.states_to_token_maps
    if isinstance(maps, dict):
        return table_bytes(maps)
    return index_bytes(guide.initial_state, maps.get_allowed_tokens, maps.get_next_state)


def probe(context, replacements) -> None:
    """Stock and replacement walk a small automaton side by side, each state met twice, in three dtypes."""
    path = next(path for path in replacements if path.endswith(CALL))
    module, shape = sys.modules[path.partition(":")[0]], SHAPES[context.form]
    guide = automaton(getattr(module, shape.guide_class))

    def processor():
        made = module.RegexLogitsProcessor.__new__(module.RegexLogitsProcessor)
        made.__dict__.update({shape.guide: guide, shape.states: defaultdict(int), "_reasoner": None})
        return made

    for expected, got, history in walk((context.stock[path], replacements[path]), processor):
        if not torch.equal(expected, got):
            raise Declined(f"its probe found other logits than stock's ({got.dtype}, after {history})")
