"""Biases: what is kept on the logits' device to add minus infinity to the logits of disallowed tokens.

The V0 engine's processors make a tensor of zeros and minus infinities for every token and add it. Adding is more than
masking: a disallowed NaN or plus infinity becomes NaN, an allowed minus zero plus zero. Every form here adds too.
"""

from __future__ import annotations

import math

import numpy as np
import torch

# The integer type that views a logit. Its lowest value is minus zero.
_VIEWS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# Up to this share of the vocabulary, ids beat a dense bias on the CPU, which has to be read from memory.
SHARE = 1 / 200


class AllowedIds:
    """Few tokens are allowed: their logits are kept aside while minus infinity is added to all."""

    def __init__(self, allowed: np.ndarray):
        self.ids = np.flatnonzero(allowed)
        self.key = b"a" + self.ids.tobytes()
        self.nbytes = 2 * self.ids.nbytes

    def add_to(self, scores: torch.Tensor) -> torch.Tensor:
        bits = scores.detach().view(_VIEWS[scores.dtype]).numpy()
        kept = bits.take(self.ids)
        # Zero is added to the allowed.
        kept[kept == np.iinfo(kept.dtype).min] = 0
        scores.add_(-math.inf)
        bits[self.ids] = kept
        return scores


class DisallowedIds:
    """Few tokens are disallowed: minus infinity is added to those, zero to all."""

    def __init__(self, allowed: np.ndarray):
        ids = np.flatnonzero(~allowed)
        self.ids = torch.from_numpy(ids)
        self.key = b"d" + ids.tobytes()
        self.nbytes = 2 * ids.nbytes

    def add_to(self, scores: torch.Tensor) -> torch.Tensor:
        biased = scores.index_select(0, self.ids).add_(-math.inf)
        return scores.add_(0.0).index_copy_(0, self.ids, biased)


class Dense:
    """Anything else: a bias for every logit."""

    def __init__(self, allowed: np.ndarray, dtype: torch.dtype, device: torch.device):
        self.key = b"b" + np.packbits(allowed).tobytes()
        bias = torch.full((len(allowed),), -math.inf, dtype=dtype)
        bias[torch.from_numpy(allowed)] = 0
        self.bias = bias.to(device)
        self.nbytes = len(self.key) + bias.nbytes

    def add_to(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.add_(self.bias)


def supports(scores: torch.Tensor) -> bool:
    """Whether these scores, the logits of one sequence, can be biased here."""
    return scores.dim() == 1 and scores.dtype in _VIEWS and scores.device.type in ("cpu", "cuda")


def build(allowed: np.ndarray, dtype: torch.dtype, device: torch.device):
    """The cheapest form for `allowed`, bool [vocab], and scores [vocab] that `supports` accepts.

    `add_to(scores)` adds in place and returns its argument; `key` tells forms apart that differ, for one length, dtype
    and device; `nbytes` is what the form holds.
    """
    # Not tensors of inference mode, in which vLLM may be: those could not be used outside of it.
    with torch.inference_mode(False):
        if device.type == "cpu":
            count, few = int(np.count_nonzero(allowed)), len(allowed) * SHARE
            if count <= few:
                return AllowedIds(allowed)
            if len(allowed) - count <= few:
                return DisallowedIds(allowed)
        return Dense(allowed, dtype, device)
