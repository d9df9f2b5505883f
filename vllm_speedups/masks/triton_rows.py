"""`kernels.mask_rows` in Triton: a program for every masked row and stretch of the vocabulary. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .packed import WORD

# Tokens a program.
STRETCH = 4096


@triton.jit
def _mask(
    logits,
    logits_stride,
    pool,
    pool_stride,
    slots,
    targets,
    starts,
    vocab_size,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.program_id(0)
    slot = tl.load(slots + index).to(tl.int64)
    target = tl.load(targets + index)
    end = vocab_size
    if STRIDE > 0:
        request = target // STRIDE
        target = tl.load(starts + request) + target % STRIDE
        # Nothing, where the device has no such position.
        end = tl.where(target < tl.load(starts + request + 1), vocab_size, 0)
    token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = token < end
    word = tl.load(pool + slot * pool_stride + token // BITS, mask=inside, other=0)
    disallowed = ((word >> (token % BITS)) & 1) == 0
    # Wide: 16,384 rows of 152k logits are more than an int32 counts.
    at = logits + target.to(tl.int64) * logits_stride + token
    tl.store(at, -float("inf"), mask=inside & disallowed)


def launch(logits, pool, slots, targets, starts, stride: int, vocab_size: int) -> None:
    """As `kernels.mask_rows`."""
    _mask[(slots.shape[0], triton.cdiv(vocab_size, STRETCH))](
        logits,
        logits.stride(0),
        pool,
        pool.stride(0),
        slots,
        targets,
        slots if starts is None else starts,
        vocab_size,
        STRIDE=0 if starts is None else stride,
        BITS=WORD,
        SIZE=STRETCH,
    )
