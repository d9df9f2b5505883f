"""Token masks the plain way: one bit after another, and logits built so that every kept bit can be seen."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIALS = (math.nan, math.inf, -math.inf, -0.0, 0.0)
VIEWS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def pack(allowed: list) -> list:
    """Words of a row, bit by bit, signed."""
    words = [0] * -(-len(allowed) // 32)
    for token, bit in enumerate(allowed):
        if bit:
            words[token // 32] |= 1 << (token % 32)
    return [word - 2**32 if word >= 2**31 else word for word in words]


def allows(row, token: int) -> bool:
    return bool(int(row[token // 32]) >> (token % 32) & 1)


def masked(logits: torch.Tensor, row, vocab_size: int) -> torch.Tensor:
    """A row of logits with minus infinity where one of the first `vocab_size` tokens is not allowed."""
    result = logits.clone()
    for token in range(vocab_size):
        if not allows(row, token):
            result[token] = -math.inf
    return result


def bits(logits: torch.Tensor) -> list:
    """What the logits are, bit for bit."""
    return logits.contiguous().view(VIEWS[logits.dtype]).tolist()


def logits(random: np.random.Generator, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bit patterns [count, width], NaN payloads among them, with every special value sprinkled in."""
    numpy_type = np.int32 if dtype is torch.float32 else np.int16
    limits = np.iinfo(numpy_type)
    patterns = random.integers(limits.min, limits.max, (count, width), dtype=numpy_type, endpoint=True)
    values = torch.from_numpy(patterns).view(dtype).clone()
    where = random.random((count, width)) < 0.2
    specials = torch.tensor(random.choice(SPECIALS, (count, width))).to(dtype)
    return torch.where(torch.from_numpy(where), specials, values)


def row(random: np.random.Generator, words: int, share: float) -> np.ndarray:
    """A packed row int32 [words] with about `share` of its bits set, the bits past any vocabulary included."""
    if share in (0, 1):
        return np.full(words, -int(share), dtype=np.int32)
    allowed = random.random(words * 32) < share
    return np.packbits(allowed, bitorder="little").view(np.int32)


randoms = st.integers(0, 2**32).map(np.random.default_rng)
shares = st.sampled_from([0, 0.001, 0.004, 0.02, 0.3, 0.5, 0.9, 0.96, 0.97, 0.99, 0.999, 1])
