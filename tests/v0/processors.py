"""What the tests of the logits processors share: a small tokenizer, histories, scores, and a comparison that misses nothing."""

from __future__ import annotations

import random
import string

import torch


class Tokenizer:
    """What outlines asks of a tokenizer: printable characters, pairs of letters, and an end of sequence."""

    def __init__(self):
        texts = list(string.printable) + [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase]
        self.eos_token, self.eos_token_id = "</s>", len(texts)
        self.all_special_tokens = [self.eos_token]
        self._texts = [*texts, self.eos_token]

    def get_vocab(self) -> dict:
        return {text: number for number, text in enumerate(self._texts)}

    def convert_tokens_to_string(self, tokens: list) -> str:
        return "".join(tokens)

    def decode(self, ids: list, **_) -> str:
        return "".join(self._texts[number] for number in ids)

    def __len__(self) -> int:
        return len(self._texts)


# Rows are short here: several threads would only wait for each other.
torch.set_num_threads(1)
TOKENIZER = Tokenizer()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REGEXES = (
    r"[a-z]{0,12}",
    r'\{"name":"[^"\\]{0,20}","n":(0|[1-9][0-9]{0,3})\}',
    r"(yes|no|maybe)",
    r"[^q]+",
    r"a",
)


def scores(chooser: random.Random, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A row of logits among which are NaN, the infinities and both zeros."""
    values = torch.randn(width, generator=torch.Generator().manual_seed(chooser.getrandbits(32)))
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0])
    for value in odd if chooser.random() < 0.7 else odd[3:]:
        places = torch.tensor([chooser.randrange(width) for _ in range(width // 20)])
        values[places] = value
    return values.to(dtype)


def outcome(function, *arguments):
    """What a call returns, or what it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error)


def same(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether two rows hold the same numbers, signs of zeros included, and NaN in the same places."""
    numbers = ~expected.isnan()
    return (
        expected.dtype == got.dtype
        and torch.equal(numbers, ~got.isnan())
        and torch.equal(expected[numbers], got[numbers])
        and torch.equal(expected[numbers].signbit(), got[numbers].signbit())
    )


def following(chooser: random.Random, history: list, biased, eos: int) -> list:
    """A history a token longer: mostly one that is allowed, at times the end or any other."""
    allowed = biased.isfinite().nonzero().flatten().tolist() if isinstance(biased, torch.Tensor) else []
    roll = chooser.random()
    if roll < 0.04:
        token = eos
    elif roll < 0.08 or not allowed:
        token = chooser.randrange(eos + 1)
    else:
        token = chooser.choice(allowed)
    return [*history, token]
