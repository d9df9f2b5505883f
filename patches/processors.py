"""Glue for logits processors that walk an outlines automaton: what `fsm-masks` and `outlines-integration` share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Callable

import numpy as np
import torch

from vllm_speedups import settings
from vllm_speedups.masks import bias
from vllm_speedups.masks.states import StateCache


@dataclass(frozen=True)
class Shape:
    """How the processors of a form are made. `guide` and `states` are attributes of the processor.

    `states` holds the state of every history by the history's hash, as stock has it: sequences of one request share it,
    a history that is not in it begins in state 0. `restart(processor)` is what an empty history begins with.
    """

    guide: str
    states: str
    restart: Callable | None = None
    # The name of the guide's class in the processors' module.
    guide_class: str = "RegexGuide"
    # Tokens past the last logit are left out; without it they are stock's to raise for.
    filters: bool = False
    # Scores are left as they are, and the biased ones returned.
    copies: bool = False
    # The reasoner's method that leaves the reasoning out of a history, where the processors have a `_reasoner`.
    content: str = ""


def make_call(context, stock, shape: Shape, module, counts: dict):
    """The `__call__(self, input_ids, scores)` of the processors in `module`, around a state cache of its own.

    Guides of other classes than `shape.guide_class`, whose rows may depend on more than the state id, are stock's.
    """
    cache = StateCache(int(settings.current().mask_cache_mb * 2**20), counts)
    guide_class = getattr(module, shape.guide_class)
    following, listed = _methods(guide_class, getattr(module, "Write", None))
    added = _added_to_copy if shape.copies else _added
    verifies = context.verifies

    def __call__(self, input_ids, scores):
        guide = getattr(self, shape.guide)
        if type(guide) is not guide_class or not bias.supports(scores):
            counts["left to stock"] += 1
            return stock(self, input_ids, scores)
        history = input_ids
        if shape.content and self._reasoner is not None:
            if not self._reasoner.is_reasoning_end(input_ids):
                return scores
            history = getattr(self._reasoner, shape.content)(input_ids)
        try:
            number = hash(tuple(history))
            if len(history):
                states = getattr(self, shape.states)
                state = states[number] = following(guide, states[hash(tuple(history[:-1]))], history[-1])
            else:
                if shape.restart is not None:
                    shape.restart(self)
                state = getattr(self, shape.states)[number]
            width, dtype = scores.shape[0], scores.dtype
            # What is added to a copy decides its type, as stock's mask does.
            kind = (width, torch.get_default_dtype() if shape.copies else dtype, scores.device)
            name = guide.__dict__.get(_NAME) or _named(guide)
            known = cache.states(name, kind)
            form = known.biases.get(state) if known is not None else None
            if form is not None:
                counts["hits"] += 1
                if not len(history):
                    cache.used(name, kind)
            else:
                allowed = _allowed(listed(guide, state), width, shape.filters)
                if allowed is None:
                    return stock(self, input_ids, scores)
                form = cache.put(name, kind, state, bias.build(allowed, *kind[1:]))
                counts["misses"] += 1
            if verifies is None or not verifies():
                return added(form, scores, kind[1])
            ours = added(form, scores.clone(), kind[1])
        except Exception as error:
            answer = stock(self, input_ids, scores)
            context.failed(error)
            return answer
        # Stock walks to the same state once more.
        expected = stock(self, input_ids, scores)
        check_scores(context, expected, ours, {"state": repr(state)}, {"tokens": list(history)})
        return expected

    return __call__


def check_scores(context, expected: torch.Tensor, ours: torch.Tensor, facts: dict, private: dict) -> None:
    """Report scores [vocab] that are not stock's, bit for bit but for NaN."""
    if expected.dtype == ours.dtype and expected.shape == ours.shape:
        different = ~((expected == ours) | (expected.isnan() & ours.isnan()))
        if not different.any():
            return
        first = int(different.nonzero()[0])
        facts = {**facts, "first that differs": first, "stock": float(expected[first]), "ours": float(ours[first])}
    kinds = {"stock": f"{expected.dtype} {tuple(expected.shape)}", "ours": f"{ours.dtype} {tuple(ours.shape)}"}
    context.differed({**facts, "scores": kinds}, private)


# The attribute that holds a guide's name, unique everywhere: guides are pickled, and their copies have the same states.
_NAME = "_speedups_guide"


def _named(guide) -> str:
    # Of two names given at the same moment the first one stays.
    return guide.__dict__.setdefault(_NAME, secrets.token_hex(16))


def _methods(guide_class: type, write: type | None) -> tuple:
    """`following(guide, state, token)`, the state after a token, and `listed(guide, state)`, the tokens of a state."""
    if not hasattr(guide_class, "get_next_instruction"):
        return guide_class.next_state, guide_class.allowed_token_ids

    def listed(guide, state):
        instruction = guide.get_next_instruction(state)
        tokens = instruction.tokens
        return tokens[:1] if write is not None and type(instruction) is write else tokens

    return guide_class.get_next_state, listed


def _allowed(tokens, width: int, filters: bool) -> np.ndarray | None:
    """bool [width] with the tokens set; None where they are not ids of these scores."""
    ids = tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.array(tokens, dtype=np.int64)
    if ids.size and filters:
        ids = ids[ids < width]
    if ids.size and not 0 <= ids.min() <= ids.max() < width:
        return None
    allowed = np.zeros(width, dtype=np.bool_)
    allowed[ids] = True
    return allowed


def _added(form, scores: torch.Tensor, _dtype: torch.dtype) -> torch.Tensor:
    return form.add_to(scores)


def _added_to_copy(form, scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return form.add_to(scores.to(torch.promote_types(scores.dtype, dtype), copy=True))


def automaton(guide_class):
    """A guide of five tokens, of which 0 ends the text, without the tokenizer that compiling would ask for."""
    tables = {0: {1: 1, 3: 2}, 1: {2: 1, 0: -1, 3: 2}}
    guide = guide_class.__new__(guide_class)
    guide.eos_token_id, guide.final_states, guide.eos_tensor = 0, {-1, 2}, torch.tensor([0])
    guide.states_to_token_maps = tables
    if hasattr(guide_class, "from_regex"):
        # The newer guides ask an index, by method.
        guide.states_to_token_maps = SimpleNamespace(
            get_allowed_tokens=lambda state: list(tables[state]) if state in tables else None,
            get_next_state=lambda state, token: tables.get(state, {}).get(token),
        )
    return guide


def walk(calls: tuple, processor: Callable):
    """Histories through `automaton`, by two calls, each with a `processor()` of its own: both results and the history."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        processors = [processor() for _ in calls]
        for history in ([], [1], [1, 2], [1, 2, 2], [3], [1], [1, 0], [2]):
            rows = [torch.linspace(-1, 1, 5).to(dtype) for _ in calls]
            yield (*(call(own, history, row) for call, own, row in zip(calls, processors, rows)), history)
