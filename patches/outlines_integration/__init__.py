"""Glue of `outlines-integration`: the logits processors for vLLM that outlines itself had."""

from __future__ import annotations

import sys
from collections import defaultdict

import torch

from vllm_speedups.patches.processors import Shape, automaton, make_call, walk
from vllm_speedups.patching import Declined
from vllm_speedups.telemetry import counters

SHAPES = {
    "outlines.serve": Shape(
        "fsm",
        "fsm_state",
        lambda processor: setattr(processor, "fsm_state", defaultdict(int)),
        guide_class="RegexFSM",
        copies=True,
    ),
    "outlines.integrations, pinned masks": Shape("fsm", "_fsm_state", copies=True),
}


def build(context) -> dict:
    """`RegexLogitsProcessor.__call__`, which the processors for JSON share."""
    ((path, stock),) = ((path, stock) for path, stock in context.stock.items() if path.endswith(".__call__"))
    module = sys.modules[path.partition(":")[0]]
    counts = counters("outlines-integration")
    return {path: make_call(context, stock, SHAPES[context.form], module, counts)}


def probe(context, replacements) -> None:
    """Stock and replacement walk a small automaton side by side, in three dtypes."""
    ((path, ours),) = replacements.items()
    if context.form.endswith("pinned masks") and not torch.cuda.is_available():
        # Stock pins its masks, which takes a GPU: there is nothing to compare with.
        return
    module, shape = sys.modules[path.partition(":")[0]], SHAPES[context.form]
    guide = automaton(getattr(module, shape.guide_class))

    def processor():
        made = module.RegexLogitsProcessor.__new__(module.RegexLogitsProcessor)
        made.__dict__.update({shape.guide: guide, shape.states: defaultdict(int), "mask_cache": {}})
        return made

    for expected, got, history in walk((context.stock[path], ours), processor):
        if expected.dtype != got.dtype or not torch.equal(expected, got):
            raise Declined(f"its probe found other logits than stock's ({got.dtype}, after {history})")
