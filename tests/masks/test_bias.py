"""Biases: every form adds what a tensor of zeros and minus infinities adds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vllm_speedups.masks import bias

VOCAB = 3000
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -7e4)
COUNTS = {0: bias.AllowedIds, 1: bias.AllowedIds, 15: bias.AllowedIds, 16: bias.Dense, 1500: bias.Dense}
COUNTS |= {2984: bias.Dense, 2985: bias.DisallowedIds, 2999: bias.DisallowedIds, 3000: bias.DisallowedIds}


def allowed_of(count: int) -> np.ndarray:
    allowed = np.zeros(VOCAB, dtype=np.bool_)
    allowed[np.random.default_rng(count).permutation(VOCAB)[:count]] = True
    return allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", COUNTS)
def test_every_form_adds_what_a_mask_of_zeros_and_infinities_adds(dtype, count):
    allowed = allowed_of(count)
    form = bias.build(allowed, dtype, torch.device("cpu"))
    assert type(form) is COUNTS[count]
    scores = torch.tensor(ODD * (VOCAB // len(ODD) + 1)).to(dtype)[:VOCAB]
    mask = torch.full((VOCAB,), -math.inf)
    mask[torch.from_numpy(allowed)] = 0
    # As vLLM writes it, beside what the form does to a row inside of a batch.
    expected, batch = scores.clone().add_(mask), torch.zeros(2, VOCAB, dtype=dtype)
    batch[1] = scores
    row = batch[1]
    assert form.add_to(row) is row
    numbers = ~expected.isnan()
    assert torch.equal(numbers, ~row.isnan()) and torch.equal(expected[numbers], row[numbers])
    assert torch.equal(expected[numbers].signbit(), row[numbers].signbit())
    assert not batch[0].any()


def test_keys_are_equal_for_equal_masks_and_differ_for_others():
    device = torch.device("cpu")
    keys = [bias.build(allowed_of(count), torch.float32, device).key for count in COUNTS]
    again = [bias.build(allowed_of(count), torch.float32, device).key for count in COUNTS]
    assert keys == again and len(set(keys)) == len(keys)


def test_masks_that_differ_in_one_late_token_have_different_keys():
    one = np.ones(VOCAB, dtype=np.bool_)
    one[:1000] = False
    other = one.copy()
    other[-1] = False
    device = torch.device("cpu")
    assert bias.build(one, torch.float32, device).key != bias.build(other, torch.float32, device).key


def test_on_other_devices_a_bias_is_dense_and_lies_there():
    device = torch.device("meta")
    form = bias.build(allowed_of(1), torch.bfloat16, device)
    assert type(form) is bias.Dense and form.bias.device == device and form.bias.dtype == torch.bfloat16


def test_which_scores_are_supported():
    assert bias.supports(torch.zeros(5)) and bias.supports(torch.zeros(5, dtype=torch.bfloat16))
    for scores in (torch.zeros(1, 5), torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.int32)):
        assert not bias.supports(scores)
    assert not bias.supports(torch.zeros(5, device="meta"))


def test_a_bias_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        form = bias.build(allowed_of(1500), torch.float32, torch.device("cpu"))
    assert not form.bias.is_inference() and form.add_to(torch.zeros(VOCAB)).isfinite().sum() == 1500
