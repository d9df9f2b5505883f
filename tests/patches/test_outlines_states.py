"""`outlines-states` beside the methods that it replaces: one grammar driven by stock, its twin by us."""

from __future__ import annotations

import inspect
import random
import threading
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vllm_speedups import settings

backend = pytest.importorskip("vllm.v1.structured_output.backend_outlines")
oc = pytest.importorskip("outlines_core")

from matching import matched  # noqa: E402

from vllm_speedups.masks.rows import RowCache  # noqa: E402
from vllm_speedups.patches import outlines_states as glue  # noqa: E402
from vllm_speedups.patching import Context, Declined  # noqa: E402

EOS, SIZE, WORDS = 40, 45, 2
TOKENS = {
    text: [number]
    for number, text in enumerate(["a", "b", "c", "ab", "ba", "abc", "0", "1", "10", '"', "{", "}", ":", ", "])
}
TOKENS["a"].append(30)
REGEXES = ("(ab|ac?)+b", "a*", "[abc]{2,4}", "(ab)*c|1", r'\{"a": ?[01]+\}|b', "abc", "(ab)*a?b?c", "a{3}|(10)+")
FORM = matched("outlines-states")
# What a grammar of this release is made of besides its vocabulary's size and its guide.
END = {} if FORM == glue.GUIDED else {"eos_token_id": EOS}
STOP_TOKENS = () if len(inspect.signature(backend.OutlinesBackend.compile_grammar).parameters) == 3 else ({3},)
STOCK = {
    glue.COMPILE: backend.OutlinesBackend.compile_grammar,
    glue.ACCEPT: backend.OutlinesGrammar.accept_tokens,
    glue.FILL: backend.OutlinesGrammar.fill_bitmask,
}


@lru_cache(None)
def index(regex: str):
    # No space: what needs one leads nowhere, which is all that this version lets through of a dead state.
    try:
        return oc.Index(regex, oc.Vocabulary(EOS, TOKENS))
    except ValueError:
        return None


def installed(budget_mb: float = 1) -> tuple:
    failures: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_current", settings.Settings(row_cache_mb=budget_mb))
        context = Context(FORM, STOCK, failures.append)
        return context, glue.build(context), failures


class Twins:
    """A grammar driven by stock and its twin driven by the replacements, from one Index."""

    def __init__(self, regex: str, replacements: dict, rows, rollback: int = 8):
        self.ours_by = replacements
        guides = (oc.Guide(index(regex), rollback) for _ in range(2))
        self.stock, self.ours = (backend.OutlinesGrammar(vocab_size=SIZE, guide=guide, **END) for guide in guides)
        self.ours._speedups_rows = rows

    def both(self, what) -> object:
        outcomes = []
        for grammar, functions in ((self.stock, STOCK), (self.ours, self.ours_by)):
            try:
                outcomes.append(("returned", what(grammar, functions)))
            except Exception as error:
                outcomes.append(("raised", type(error), str(error)))
        assert outcomes[0] == outcomes[1]
        self.compare()
        return outcomes[0]

    def compare(self) -> None:
        public = []
        for grammar in (self.stock, self.ours):
            guide = grammar.guide
            public.append(
                (
                    grammar.num_processed_tokens,
                    grammar.is_terminated(),
                    grammar.vocab_size,
                    getattr(grammar, "eos_token_id", None),
                    guide.get_state(),
                    guide.is_finished(),
                    grammar.validate_tokens([0, 1, EOS]),
                    sorted(guide.get_tokens()),
                )
            )
        assert public[0] == public[1]

    def accept(self, tokens: list):
        return self.both(lambda grammar, functions: functions[glue.ACCEPT](grammar, "r", list(tokens)))

    def fill(self) -> torch.Tensor:
        rows = []
        for grammar, functions in ((self.stock, STOCK), (self.ours, self.ours_by)):
            bitmask = torch.full((3, WORDS), 77, dtype=torch.int32)
            assert functions[glue.FILL](grammar, bitmask, 1) is None
            rows.append(bitmask)
        assert torch.equal(*rows)
        self.compare()
        return rows[1][1]

    def rollback(self, count: int):
        return self.both(lambda grammar, _: grammar.rollback(count))

    def reset(self):
        return self.both(lambda grammar, _: grammar.reset())


tokens = st.one_of(st.integers(0, 13), st.sampled_from([EOS, 30, 41, 44]))
events = st.lists(
    st.one_of(
        st.tuples(st.just("walk"), st.integers(0, 2**16)),
        st.tuples(st.just("accept"), st.lists(tokens, max_size=4)),
        st.tuples(st.just("rollback"), st.integers(0, 3)),
        st.tuples(st.sampled_from(["reset", "fill", "fill", "end"]), st.just(0)),
    ),
    max_size=25,
)


@pytest.mark.parametrize("budget", [2**20, 600, 0])
@given(
    runs=st.lists(st.tuples(st.sampled_from(REGEXES), events), min_size=1, max_size=4),
    rollback=st.sampled_from([0, 2, 8]),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_every_step_of_every_walk_is_as_stock_takes_it(budget, runs, rollback):
    _, replacements, failures = installed()
    cache = RowCache(budget)
    for regex, steps in runs:
        if index(regex) is None:
            continue
        twins = Twins(regex, replacements, cache.grammar(regex), rollback)
        for what, value in steps:
            if what == "walk":
                allowed = sorted(twins.stock.guide.get_tokens())
                twins.accept([allowed[value % len(allowed)]])
            elif what == "accept":
                twins.accept(value)
            elif what == "end":
                twins.accept([EOS])
            elif what == "rollback":
                # The engine takes back no more than was accepted.
                if value <= twins.stock.num_processed_tokens and twins.rollback(value)[0] == "raised":
                    break
            elif what == "reset":
                twins.reset()
            else:
                twins.fill()
        twins.fill()
        assert cache.nbytes <= budget
    assert not failures


@pytest.mark.skipif(FORM == glue.GUIDED, reason="this vLLM leaves termination to the guide")
def test_termination_tokens_after_it_and_the_way_back():
    _, replacements, _ = installed()
    rows = RowCache(2**20).grammar("g")
    for _ in range(2):
        twins = Twins("(ab)*c|1", replacements, rows)
        twins.fill()
        assert twins.accept([EOS]) == ("returned", False)
        assert twins.accept([3, EOS]) == ("returned", False)
        assert twins.accept([2, EOS, 3, 3]) == ("returned", True) and twins.ours.is_terminated()
        twins.fill()
        assert twins.accept([0, 1]) == ("returned", True)
        twins.rollback(1)
        assert not twins.ours.is_terminated()
        twins.fill()
        twins.rollback(1)
        assert twins.accept([13]) == ("returned", False)
        twins.reset()
        twins.fill()


@pytest.mark.skipif(FORM != glue.GUIDED, reason="this vLLM takes the end of the text out of what a guide gets")
def test_the_end_of_the_text_is_the_guides_affair():
    _, replacements, _ = installed()
    rows = RowCache(2**20).grammar("g")
    for _ in range(2):
        twins = Twins("(ab)*c|1", replacements, rows)
        assert twins.accept([EOS]) == ("returned", False)
        assert twins.accept([3, 2]) == ("returned", True)
        twins.fill()
        for tokens in ([EOS], [EOS, EOS], [3], [EOS, 3]):
            twins.accept(tokens)
            twins.fill()
        twins.rollback(1)
        twins.fill()
        twins.reset()
        twins.fill()


def test_a_row_that_was_seen_is_not_filled_again_and_one_that_was_not_is():
    filled = []

    def fill(self, bitmask, idx):
        filled.append(self.guide.get_state())
        return STOCK[glue.FILL](self, bitmask, idx)

    context = Context(FORM, {**STOCK, glue.FILL: fill}, lambda error: pytest.fail(str(error)))
    replacements, rows = glue.build(context), RowCache(2**20).grammar("g")
    for _ in range(3):
        twins = Twins("(ab|ac?)+b", replacements, rows)
        for token in (0, 1, 3, 0):
            twins.fill()
            twins.accept([token])
    assert filled and len(filled) == len(set(filled))


def test_a_row_of_another_width_is_filled_anew():
    _, replacements, _ = installed()
    rows = RowCache(2**20).grammar("g")
    twins = Twins("a*", replacements, rows)
    twins.fill()
    for words in (WORDS + 1, WORDS):
        expected, got = (torch.full((1, words), 5, dtype=torch.int32) for _ in range(2))
        STOCK[glue.FILL](twins.stock, expected, 0)
        replacements[glue.FILL](twins.ours, got, 0)
        assert torch.equal(expected, got)


def test_grammars_that_we_did_not_compile_are_stocks():
    _, replacements, _ = installed()
    twins = Twins("(ab)*c|1", replacements, None)
    del twins.ours._speedups_rows
    for token in (3, 2, EOS, 5):
        twins.fill()
        twins.accept([token])


@pytest.mark.parametrize("budget_mb", [1, 0])
def test_threads_that_fill_and_walk_one_grammar_get_stocks_rows(budget_mb):
    _, replacements, failures = installed()
    cache, errors = RowCache(int(budget_mb * 2**20) or 900), []

    def work(seed):
        try:
            chance = random.Random(seed)
            for _ in range(25):
                regex = chance.choice(("(ab|ac?)+b", "[abc]{2,4}", "a*"))
                twins = Twins(regex, replacements, cache.grammar(regex))
                for _ in range(6):
                    twins.fill()
                    twins.accept([chance.choice(sorted(twins.stock.guide.get_tokens()))])
        except BaseException as error:
            errors.append(error)

    for regex in REGEXES:
        index(regex)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not failures


def backend_of() -> object:
    """A real backend without an engine: its vocabulary is ours."""
    made = backend.OutlinesBackend.__new__(backend.OutlinesBackend)
    made.vocabulary = SimpleNamespace(inner=oc.Vocabulary(EOS, TOKENS), _hash="x")
    made.cache, made.vocab_size = {}, SIZE
    made.vllm_config = SimpleNamespace(speculative_config=None)
    return made


def test_grammars_compiled_from_the_same_thing_share_rows_and_others_do_not():
    _, replacements, failures = installed()
    kinds = backend.StructuredOutputOptions
    one, other = backend_of(), backend_of()
    compile_grammar = replacements[glue.COMPILE]
    first = compile_grammar(one, kinds.REGEX, "a*")
    assert compile_grammar(one, kinds.REGEX, "a*", *STOP_TOKENS)._speedups_rows is first._speedups_rows
    different = [
        compile_grammar(one, kinds.REGEX, "abc"),
        compile_grammar(one, kinds.CHOICE, '["abc", "a"]'),
        compile_grammar(other, kinds.REGEX, "a*"),
    ]
    assert len({id(grammar._speedups_rows) for grammar in [first, *different]}) == 4 and not failures
    with pytest.raises(ValueError, match="Invalid request type"):
        compile_grammar(one, kinds.GRAMMAR, "root ::= 'a'")


def test_the_probe_passes_on_the_real_thing_and_tells_wrong_ones():
    context, replacements, failures = installed()
    glue.probe(context, replacements)
    assert not failures

    def forgets(self, request_id, tokens):
        answer = replacements[glue.ACCEPT](self, request_id, tokens)
        self.num_processed_tokens = 0
        return answer

    def allows_all(self, bitmask, idx):
        bitmask[idx] = -1

    for wrong in ({glue.ACCEPT: forgets}, {glue.FILL: allows_all}):
        with pytest.raises(Declined, match="its probe found"):
            glue.probe(context, {**replacements, **wrong})
