"""`xgrammar-processors` beside stock's processor, on the release's own code."""

from __future__ import annotations

import copy
import importlib
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from processors import TOKENIZER, following, outcome, same, scores

from vllm_speedups.patches import xgrammar_processors as glue
from vllm_speedups.patching import Context, Declined
from vllm_speedups.patching.targets import resolve
from vllm_speedups.plugin import discover

PATCH = next(patch for patch in discover() if patch.name == "xgrammar-processors")
try:
    PATCH.check()
except Declined as no:
    pytest.skip(f"not in this release: {no}", allow_module_level=True)
decoding = importlib.import_module(glue.MODULE)
STOCK = {path: resolve(path) for path in PATCH.form.targets}
EOS, WIDTH = TOKENIZER.eos_token_id, len(TOKENIZER)
METADATA = f'{{"vocab_type":0,"vocab_size":{WIDTH},"add_prefix_space":false,"stop_token_ids":[{EOS}]}}'


def data():
    return decoding.TokenizerData(encoded_vocab=list(TOKENIZER.get_vocab()), metadata=METADATA)


def installed() -> tuple:
    failures: list = []
    return glue.build(Context(PATCH.form.name, STOCK, failures.append)), failures


def config(**guide):
    return decoding.GrammarConfig(tokenizer_hash=1, tokenizer_data=data(), max_threads=1, **guide)


GUIDES = (
    {"grammar_str": 'root ::= "[" [a-z]{0,8} "]" | "no"'},
    {"json_str": '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'},
    {"grammar_str": 'root ::= [^q]+'},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [WIDTH, WIDTH - 1, WIDTH + 90])
def test_rows_and_matchers_end_as_stock_leaves_them(dtype, width):
    replacements, failures = installed()
    chooser = random.Random(width)
    for guide in GUIDES:
        own = config(**guide)
        both = [decoding.XGrammarLogitsProcessor(own) for _ in range(2)]
        for _ in range(2):
            history: list = []
            for _ in range(14):
                row = scores(chooser, width, dtype)
                rows = row.clone(), row.clone()
                calls = STOCK[glue.CALL], replacements[glue.CALL]
                expected, got = (outcome(call, each, history, mine) for call, each, mine in zip(calls, both, rows))
                if isinstance(expected, tuple):
                    assert got == expected
                    break
                assert same(expected, got) and same(*rows)
                assert torch.equal(both[0].token_bitmask, both[1].token_bitmask)
                assert both[0].matchers[0].is_terminated() == both[1].matchers[0].is_terminated()
                history = following(chooser, history, expected, EOS)
            both = [each.clone() for each in both]
    assert not failures


def test_a_request_that_reasons_is_left_alone():
    replacements, failures = installed()
    reasoner = SimpleNamespace(is_reasoning_end=lambda ids: 1 in ids)
    processor = decoding.XGrammarLogitsProcessor(config(**GUIDES[0]), reasoner)
    row = torch.zeros(WIDTH)
    assert replacements[glue.CALL](processor, [5], row) is row and row.isfinite().all()
    replacements[glue.CALL](processor, [5, 1], row)
    assert not row.isfinite().all() and not failures


def test_a_tokenizer_is_made_once_for_equal_vocabularies_and_anew_for_others():
    replacements, _ = installed()
    make = replacements[glue.TOKENIZER].__func__
    first = make(data())
    assert make(data()) is first and make(pickle.loads(pickle.dumps(data()))) is first
    other = decoding.TokenizerData(encoded_vocab=[*data().encoded_vocab[:-2], "zz!", "</s>"], metadata=METADATA)
    assert make(other) is not first and make(copy.copy(other)) is make(other)


def test_the_probe_passes_on_the_real_thing_and_tells_a_wrong_one():
    failures: list = []
    context = Context(PATCH.form.name, STOCK, failures.append)
    replacements = glue.build(context)
    glue.probe(context, replacements)
    assert not failures
    with pytest.raises(Declined, match="other logits"):
        glue.probe(context, {**replacements, glue.CALL: lambda self, ids, row: STOCK[glue.CALL](self, ids, row) - 1})
