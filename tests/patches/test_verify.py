"""Verify mode of every patch: a corrupted cache is noticed, stock's answer is what comes out, and no text is told."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_speedups import settings

pytest.importorskip("vllm")

from matching import matched

from vllm_speedups.masks import device, tracking
from vllm_speedups.patches import block_hashes, grammar_masks, outlines_states
from vllm_speedups.patching import Context
from vllm_speedups.prefix import memo

SECRET = "(Zanzibar){2}"


class Judge:
    """A context in which every answer is verified, and what it was told."""

    def __init__(self, form: str, stock: dict, due=lambda: True):
        self.differences: list = []
        self.context = Context(
            form,
            stock,
            failed=lambda error: pytest.fail(repr(error)),
            verifies=due,
            differed=lambda facts, private: self.differences.append((facts, private)),
        )

    def told(self) -> str:
        """What the log would show of the only difference."""
        ((facts, private),) = self.differences
        assert private and "Zanzibar" not in json.dumps(facts)
        return json.dumps(facts)


def corrupt(rows: dict, word: int, bits: int) -> None:
    """Flip bits of the only row there is."""
    ((state, row),) = rows.items()
    rows[state] = row.copy()
    rows[state][word] ^= bits


@pytest.fixture(params=["guidance", "xgrammar"])
def tracked(request, monkeypatch):
    """Replacements of a tracked backend that verify everything, with stock's methods and a matcher that learnt."""
    from test_tracked_backends import Guidance, XGrammar

    kind = {"guidance": Guidance, "xgrammar": XGrammar}[request.param]
    monkeypatch.setattr(tracking, "EXPENSIVE", -1.0)
    monkeypatch.setattr(settings, "_current", settings.Settings(row_cache_mb=4))
    glue = kind.glue
    stock = {
        glue.COMPILE: lambda backend, request_type, regex, stop_token_ids=None: kind.compiled(regex),
        glue.ACCEPT: kind.grammar_class.accept_tokens,
        glue.ROLLBACK: kind.grammar_class.rollback,
        glue.RESET: kind.grammar_class.reset,
        glue.FILL: kind.grammar_class.fill_bitmask,
    }
    judge = Judge(matched(kind.name), stock)
    ours = glue.build(judge.context)
    grammar = ours[glue.COMPILE](SimpleNamespace(), "regex", SECRET)
    grammar._speedups.grammar.dear = True
    if grammar._speedups.source:
        grammar._speedups.tracker.build(grammar._speedups.grammar, grammar._speedups.source)

    def fill(methods):
        bitmask = torch.zeros((2, (kind.size + 31) // 32), dtype=torch.int32)
        methods[glue.FILL](grammar, bitmask, 1)
        return bitmask[1].numpy()

    return judge, grammar, lambda: fill(ours), lambda: fill(stock)


def test_a_right_row_is_verified_and_comes_out(tracked):
    judge, _, ours, stock = tracked
    for _ in range(3):
        assert np.array_equal(ours(), stock())
    assert judge.differences == []


def test_a_corrupted_row_is_noticed_and_stocks_comes_out(tracked):
    judge, grammar, ours, stock = tracked
    ours()
    corrupt(grammar._speedups.grammar.rows.rows, 1, 64)
    assert np.array_equal(ours(), stock())
    told = judge.told()
    assert "1 of" in told and "first at 1" in told and f"{len(SECRET)} characters" in told
    assert judge.differences[0][1]["specification"] == SECRET


@pytest.fixture
def outlines(monkeypatch):
    from test_outlines_states import EOS, SIZE, STOCK, WORDS, backend, index, oc

    monkeypatch.setattr(settings, "_current", settings.Settings(row_cache_mb=1))
    judge = Judge(matched("outlines-states"), STOCK)
    ours = outlines_states.build(judge.context)
    grammar = backend.OutlinesGrammar(SIZE, EOS, oc.Guide(index("(ab|ac?)+b"), 8))
    grammar._speedups_rows = (
        outlines_states.RowCache(2**20).grammar((0, "regex", SECRET)) if matched("outlines-states") else None
    )

    def fill(methods):
        bitmask = torch.zeros((2, WORDS), dtype=torch.int32)
        methods[outlines_states.FILL](grammar, bitmask, 1)
        return bitmask[1].numpy()

    return judge, grammar, ours, STOCK, fill


def test_a_corrupted_outlines_row_is_noticed_and_stocks_comes_out(outlines):
    judge, grammar, ours, stock, fill = outlines
    fill(ours)
    fill(ours)
    assert judge.differences == []
    corrupt(grammar._speedups_rows.rows, 0, 2)
    assert np.array_equal(fill(ours), fill(stock))
    assert "1 of" in judge.told()


def test_outlines_answers_are_verified_by_going_back(outlines):
    from test_outlines_states import EOS, SIZE, backend, index, oc

    judge, grammar, ours, stock, _ = outlines
    twin = backend.OutlinesGrammar(SIZE, EOS, oc.Guide(index("(ab|ac?)+b"), 8))
    drawn = []
    for tokens in ([0], [1], [0, 2], [12], [0, 1, EOS], [1, EOS], [1], [EOS], [0]):
        answers = []
        for one, methods in ((grammar, ours), (twin, stock)):
            answer = methods[outlines_states.ACCEPT](one, "r", tokens)
            answers.append((answer, one.guide.get_state(), one.num_processed_tokens, one.is_terminated()))
        assert answers[0] == answers[1]
        drawn.append(answers[0])
    assert judge.differences == [] and drawn[-1][3] and {answer for answer, *_ in drawn} == {True, False}


def test_a_wrong_outlines_answer_is_noticed_and_stocks_stands(outlines):
    judge, grammar, ours, _, _ = outlines
    real = grammar.guide

    class Refuses:
        """Says no to the first question: what a fault of ours could look like."""

        asked = 0

        def __getattr__(self, name):
            return getattr(real, name)

        def accepts_tokens(self, tokens):
            self.asked += 1
            return real.accepts_tokens(tokens) if self.asked > 1 else False

    grammar.guide = Refuses()
    assert ours[outlines_states.ACCEPT](grammar, "r", [0]) is True
    assert grammar.num_processed_tokens == 1
    assert "answer" in judge.told()


def test_a_flipped_digest_is_noticed_and_stocks_comes_out(monkeypatch):
    from prefix import releases
    from prefix.test_stock import Session

    release = releases.installed()
    function = release.hashes["sha256"]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    release.module.init_none_hash(function)
    judge = Judge(release.form.name, release.stock)
    ours = block_hashes.build(judge.context)[block_hashes.TARGET](16, function)
    stock = release.factory(16, function)
    request = Session(release.constant_list, range(1600), salt="Zanzibar")
    assert ours(request) == stock(request) == ours(request) and judge.differences == []
    find = memo.PrefixMemo.find

    def flipped(self, *arguments):
        digests = find(self, *arguments)
        return [*digests[:-1], bytes([digests[-1][0] ^ 1]) + digests[-1][1:]] if digests else digests

    monkeypatch.setattr(memo.PrefixMemo, "find", flipped)
    assert ours(request) == stock(request)
    told = judge.told()
    assert '"first that differs": 99' in told and "cache_salt" in told
    assert judge.differences[0][1]["tokens"] == list(range(1600))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrongly_masked_logits_are_noticed_and_stocks_come_out(monkeypatch, dtype):
    from test_grammar_masks import FORM, STOCK, simple

    judge = Judge(FORM, {grammar_masks.TARGET: STOCK})
    ours = grammar_masks.build(judge.context)[grammar_masks.TARGET]
    arguments = simple([[2, 1], [7, -1]], ["a", "Zanzibar"], ["a", "Zanzibar"])
    logits = torch.arange(128.0).view(2, 64).to(dtype)
    logits[0, 1] = float("nan")
    expected, got = logits.clone(), logits.clone()
    STOCK(*arguments, expected)
    ours(*arguments, got)
    assert torch.equal(got.nan_to_num(1), expected.nan_to_num(1)) and judge.differences == []
    real = device.Applier.apply

    def off_by_one(self, logits, vocab_size, placed):
        real(self, logits, vocab_size, placed)
        logits[1, 2] = -1.0

    monkeypatch.setattr(device.Applier, "apply", off_by_one)
    got = logits.clone()
    ours(*arguments, got)
    assert torch.equal(got.nan_to_num(1), expected.nan_to_num(1))
    assert '"first that differs": [1, 2]' in judge.told()


def test_what_is_not_drawn_is_not_verified(monkeypatch):
    from test_grammar_masks import FORM, STOCK, simple

    asked = []

    def stock(*arguments):
        asked.append(arguments)
        return STOCK(*arguments)

    judge = Judge(FORM, {grammar_masks.TARGET: stock}, due=lambda: False)
    ours = grammar_masks.build(judge.context)[grammar_masks.TARGET]
    ours(*simple(), torch.zeros(1, 32))
    assert asked == [] and judge.differences == []
