"""Device masks: the three forms leave the same bits at every density, dtype and width, namely those of a plain loop."""

from __future__ import annotations

import numpy as np
import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_speedups.masks import device

FORMS = (device.AllowedIds, device.DisallowedIds, device.Dense, device.Unpacked)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", plain.DTYPES)
@given(random=plain.randoms, share=plain.shares, words=st.integers(1, 6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_form_at_every_density_masks_as_a_plain_loop_does(form, dtype, random, share, words, data):
    vocab_size = data.draw(st.integers(1, words * 32))
    width = vocab_size + data.draw(st.integers(0, 40))
    row = plain.row(random, words, share)
    logits = plain.logits(random, 3, width, dtype)
    expected = [logits[0], plain.masked(logits[1], row, vocab_size), logits[2]]
    expected = [plain.bits(values) for values in expected]
    device.Applier().apply(logits, vocab_size, [(1, form(row, vocab_size))])
    assert plain.bits(logits) == expected


@pytest.mark.parametrize("dtype", plain.DTYPES)
@given(random=plain.randoms, data=st.data())
@settings(max_examples=60, deadline=None)
def test_forms_mix_in_one_batch_shared_or_not_in_any_order(dtype, random, data):
    words = data.draw(st.integers(1, 4))
    vocab_size = data.draw(st.integers(1, words * 32))
    count = data.draw(st.integers(1, 9))
    rows = [plain.row(random, words, data.draw(plain.shares)) for _ in range(3)]
    forms = [data.draw(st.sampled_from(FORMS))(row, vocab_size) for row in rows]
    indices = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    chosen = [data.draw(st.integers(0, 2)) for _ in indices]
    logits = plain.logits(random, count, vocab_size + data.draw(st.integers(0, 3)), dtype)
    expected = list(logits.clone())
    for index, choice in zip(indices, chosen):
        expected[index] = plain.masked(expected[index], rows[choice], vocab_size)
    device.Applier().apply(logits, vocab_size, [(index, forms[choice]) for index, choice in zip(indices, chosen)])
    assert plain.bits(logits) == [plain.bits(values) for values in expected]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", plain.DTYPES)
def test_rows_of_a_larger_tensor_are_masked_in_place_and_nothing_beside_them(form, dtype):
    random = np.random.default_rng(1)
    whole = plain.logits(random, 8, 100, dtype)
    part = whole[1:7:2, 5:75]
    assert not part.is_contiguous()
    row = plain.row(random, 3, 0.5)
    expected = whole.clone()
    for index in (1, 3, 5):
        expected[index, 5:75] = plain.masked(whole[index, 5:75], row, 70)
    device.Applier().apply(part, 70, [(index, form(row, 70)) for index in range(3)])
    assert plain.bits(whole) == plain.bits(expected)


def test_one_applier_serves_batches_of_any_dtype_and_width_in_turn():
    random, applier = np.random.default_rng(2), device.Applier()
    row = plain.row(random, 4, 0.5)
    for vocab_size in (128, 97, 128, 33):
        for dtype in plain.DTYPES:
            logits = plain.logits(random, 2, vocab_size, dtype)
            expected = [plain.bits(plain.masked(values, row, vocab_size)) for values in logits]
            form = device.Dense(row, vocab_size)
            applier.apply(logits, vocab_size, [(0, form), (1, form)])
            assert plain.bits(logits) == expected


def test_logits_that_need_a_gradient_or_were_made_for_inference_are_masked():
    row = plain.row(np.random.default_rng(3), 2, 0.5)
    with torch.inference_mode():
        made = torch.zeros(1, 64)
    for logits, guard in ((torch.zeros(1, 64, requires_grad=True), torch.no_grad()), (made, torch.inference_mode())):
        for form in FORMS:
            with guard:
                device.Applier().apply(logits, 64, [(0, form(row, 64))])
                assert torch.equal(logits[0], plain.masked(torch.zeros(64), row, 64))


@pytest.mark.parametrize("quick", [False, True])
@given(random=plain.randoms, share=plain.shares, words=st.integers(1, 400), data=st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_form_is_chosen_masks_alike(quick, random, share, words, data):
    vocab_size = data.draw(st.integers(1, words * 32))
    row = plain.row(random, words, share)
    form = device.build(row, vocab_size, quick)
    assert isinstance(form, FORMS) and form.nbytes >= 0
    logits = plain.logits(random, 1, vocab_size, torch.float32)
    expected = np.where(device.unpack(row, vocab_size), logits[0].numpy(), -np.inf).view(np.int32)
    kept = device.unpack(row, vocab_size).view(bool)
    before = logits[0].numpy().view(np.int32).copy()
    device.Applier().apply(logits, vocab_size, [(0, form)])
    after = logits[0].numpy().view(np.int32)
    assert np.array_equal(after[kept], before[kept]) and np.array_equal(after[~kept], expected[~kept])


def test_the_form_follows_the_share_of_tokens_allowed():
    vocab_size = 32_000
    allowed = np.zeros(vocab_size, dtype=bool)
    kinds = {}
    for count in (0, 1, 100, 8_000, 16_000, 31_000, 31_990, 32_000):
        allowed[:count] = True
        kinds[count] = type(device.build(device_row(allowed), vocab_size))
    assert [kinds[count] for count in (0, 1, 100)] == [device.AllowedIds] * 3
    assert [kinds[count] for count in (8_000, 16_000)] == [device.Dense] * 2
    assert [kinds[count] for count in (31_000, 31_990, 32_000)] == [device.DisallowedIds] * 3


def device_row(allowed: np.ndarray) -> np.ndarray:
    return np.packbits(allowed, bitorder="little").view(np.int32)


@pytest.mark.parametrize("count", [0, 1, 100, 16_000, 31_990, 32_000])
def test_nbytes_is_what_a_form_holds(count):
    allowed = np.zeros(32_000, dtype=bool)
    allowed[:count] = True
    form = device.build(device_row(allowed), 32_000)
    held = form.allowed.numel() * form.allowed.element_size() if isinstance(form, device.Dense) else form.ids.nbytes
    assert form.nbytes == held
