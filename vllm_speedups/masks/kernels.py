"""The kernel that masks logits with resident rows, found by slot: in Triton for CUDA, and the same in plain torch.

`mask_rows(logits, pool, slots, targets, starts, stride, vocab_size)`: for each i, what row `pool[slots[i]]` disallows among
the first `vocab_size` logits becomes minus infinity in one row of `logits` [n, width], in place. Which one:

    starts is None   row `targets[i]`
    else             `targets[i]` is request * stride + position, and the row is `starts[request] + position`; none if that is
                     not before `starts[request + 1]`, which is known on the device only (vLLM's second runner)

`pool` is int32 [capacity, words], `slots` and `targets` are int32 [m], `starts` is int32 or None; all on one device.
"""

from __future__ import annotations

import math

import torch

from .packed import WORD


def mask_rows(logits, pool, slots, targets, starts, stride: int, vocab_size: int) -> None:
    """In plain torch, on any device; a row at a time, for tests and for comparing."""
    bits = torch.arange(WORD, dtype=torch.int32, device=pool.device)
    for slot, target in zip(slots.tolist(), targets.tolist()):
        if starts is not None:
            request, position = divmod(target, stride)
            target = int(starts[request]) + position
            if target >= int(starts[request + 1]):
                continue
        allowed = (pool[slot][:, None] >> bits & 1).flatten()[:vocab_size] != 0
        logits[target, : len(allowed)].masked_fill_(~allowed, -math.inf)


def triton_kernel():
    """`mask_rows` in Triton. Raises ImportError without Triton."""
    from .triton_rows import launch

    return launch
