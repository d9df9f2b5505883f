"""`outlines-integration` beside the processors that outlines had for vLLM, on the installed outlines."""

from __future__ import annotations

import copy
import importlib
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from processors import DTYPES, REGEXES, TOKENIZER, following, outcome, same, scores

from vllm_speedups.patches import outlines_integration as glue
from vllm_speedups.patching import APPLIED, NOT_MEANT, Context, Declined, apply
from vllm_speedups.patching.engine import installed_version
from vllm_speedups.patching.targets import resolve
from vllm_speedups.plugin import discover


def fresh():
    return next(patch for patch in discover() if patch.name == "outlines-integration")


PATCH = fresh()
if not PATCH.contract.meant_for(installed_version("outlines")):
    # What is left to check where outlines has no such processors.
    def test_the_patch_is_not_meant_for_this_outlines():
        patch = fresh()
        apply([patch], "0.8.5", lambda contract: "")
        assert patch.status == NOT_MEANT and "outlines" in patch.reason

    pytest.skip("the processors are not in this outlines", allow_module_level=True)

PATCH.check()
for path in PATCH.form.targets:
    importlib.import_module(path.partition(":")[0])
((PATH, STOCK),) = ((path, resolve(path)) for path in PATCH.form.targets)
MODULE, SHAPE = importlib.import_module(PATH.partition(":")[0]), glue.SHAPES[PATCH.form.name]
EOS, WIDTH = TOKENIZER.eos_token_id, len(TOKENIZER)


@pytest.fixture(autouse=True)
def pinning(monkeypatch):
    """Pinned memory takes a GPU; where there is none, memory that is not pinned holds the same numbers."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.fixture(scope="module")
def made() -> dict:
    """A processor for each regular expression, to be copied."""
    model = SimpleNamespace(get_tokenizer=lambda: TOKENIZER, tokenizer=SimpleNamespace(tokenizer=TOKENIZER))
    return {regex: MODULE.RegexLogitsProcessor(regex, model) for regex in REGEXES}


def installed() -> tuple:
    failures: list = []
    return glue.build(Context(PATCH.form.name, {PATH: STOCK}, failures.append))[PATH], failures


def pair(original) -> tuple:
    both = copy.copy(original), copy.copy(original)
    for each in both:
        each.__dict__.update({SHAPE.states: defaultdict(int)} if SHAPE.states in each.__dict__ else {})
        each.__dict__.update({"mask_cache": {}} if "mask_cache" in each.__dict__ else {})
    return both


def compare(ours, both: tuple, history: list, row: torch.Tensor):
    """Stock and ours on one history and row: the same outcome, of the same dtype, the row untouched. Ours' outcome."""
    rows = row.clone(), row.clone()
    expected, got = (outcome(call, each, history, own) for call, each, own in zip((STOCK, ours), both, rows))
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), got
        assert same(expected, got) and got is not rows[1] and same(rows[1], row), (history, row.dtype)
    else:
        assert got == expected
    assert getattr(both[0], SHAPE.states, None) == getattr(both[1], SHAPE.states, None)
    return got


@pytest.mark.parametrize("seed", range(8))
def test_logits_are_those_of_stock(made, seed):
    ours, failures = installed()
    chooser = random.Random(seed)
    dtype, width = DTYPES[seed % len(DTYPES)], WIDTH + chooser.choice((0, 0, 7, 3000))
    for regex in REGEXES:
        both, histories = pair(made[regex]), [[]]
        for _ in range(16):
            if chooser.random() < 0.1:
                histories.append(list(chooser.choice(histories)))
            for number, history in enumerate(histories):
                got = compare(ours, both, history, scores(chooser, width, dtype))
                histories[number] = following(chooser, history, got, EOS)
    assert not failures


def test_a_history_that_begins_in_the_middle_is_treated_as_stock_treats_it(made):
    ours, failures = installed()
    for regex in REGEXES:
        both = pair(made[regex])
        for history in ([5, 6], [], [EOS], [EOS, 5], [5, 6]):
            compare(ours, both, history, scores(random.Random(0), WIDTH, torch.float32))
    assert not failures


def test_too_few_logits_raise_what_stock_raises(made):
    ours, failures = installed()
    both = pair(made[r"[^q]+"])
    assert isinstance(compare(ours, both, [], torch.zeros(WIDTH - 100)), tuple) and not failures


def test_the_patch_goes_in_is_proven_and_goes_out_again():
    patch = fresh()
    apply([patch], "0.4.2", lambda contract: "", eager=True)
    try:
        assert patch.status == APPLIED and patch.live, patch.reason
        assert MODULE.RegexLogitsProcessor.__call__ is not STOCK
    finally:
        patch.revert()
    assert MODULE.RegexLogitsProcessor.__call__ is STOCK


@pytest.mark.skipif(PATCH.form.name.endswith("pinned masks"), reason="cannot be compared without a GPU at load")
def test_the_probe_tells_a_wrong_replacement():
    context = Context(PATCH.form.name, {PATH: STOCK}, lambda error: None)

    def wrong(self, input_ids, row):
        return STOCK(self, input_ids, row) * 2

    with pytest.raises(Declined, match="other logits"):
        glue.probe(context, {PATH: wrong})
