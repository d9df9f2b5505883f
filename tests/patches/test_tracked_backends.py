"""`guidance-history` and `xgrammar-states` beside the methods that they replace: one matcher driven by stock, one by us."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vllm_speedups import settings, telemetry

guidance = pytest.importorskip("vllm.v1.structured_output.backend_guidance")
xgrammar = pytest.importorskip("vllm.v1.structured_output.backend_xgrammar")
llguidance = pytest.importorskip("llguidance")
xgr = pytest.importorskip("xgrammar")

from matching import matched  # noqa: E402

from vllm_speedups.masks import tracking  # noqa: E402
from vllm_speedups.masks.packed import allowed_ids  # noqa: E402
from vllm_speedups.patches import guidance_history, xgrammar_states  # noqa: E402
from vllm_speedups.patching import Context  # noqa: E402

REGEXES = ("(ab|ac?)+b", "[ab]{2,4}c*", '"[a-c]{0,3}"(,"[a-c]{0,3}")*', "a(b|c)*|(ab)+")


class Guidance:
    """llguidance over single bytes."""

    name, glue = "guidance-history", guidance_history
    tokenizer = llguidance.LLTokenizer("byte")
    size, eos = tokenizer.vocab_size, tokenizer.eos_token
    grammar_class, backend_class = guidance.GuidanceGrammar, guidance.GuidanceBackend

    @classmethod
    def compiled(cls, regex: str):
        matcher = llguidance.LLMatcher(cls.tokenizer, llguidance.grammar_from("regex", regex), log_level=0)
        return guidance.GuidanceGrammar(matcher, cls.tokenizer, cls.size, printed_error=True)


class XGrammar:
    """xgrammar over single bytes, a few longer tokens and an end."""

    name, glue = "xgrammar-states", xgrammar_states
    words = (*(bytes([byte]) for byte in range(128)), b"ab", b"abc", b'","', b"bb", b"</s>")
    size, eos = len(words), len(words) - 1
    compiler = xgr.GrammarCompiler(
        xgr.TokenizerInfo(list(words), vocab_type=xgr.VocabType.RAW, stop_token_ids=[eos]),
        max_threads=1,
        cache_enabled=False,
    )
    grammar_class, backend_class = xgrammar.XgrammarGrammar, xgrammar.XgrammarBackend

    @classmethod
    def compiled(cls, regex: str):
        compiled = cls.compiler.compile_regex(regex)
        return xgrammar.XgrammarGrammar(cls.size, xgr.GrammarMatcher(compiled, max_rollback_tokens=200), compiled)


class Installed:
    """A patch's replacements around stock's methods, every row kept, and the matchers that they drive."""

    def __init__(self, kind, proves: bool = True, budget_mb: float = 4):
        glue, self.kind, self.failures = kind.glue, kind, []
        stock = {
            glue.COMPILE: lambda backend, request_type, regex, stop_token_ids=None: kind.compiled(regex),
            glue.ACCEPT: kind.grammar_class.accept_tokens,
            glue.ROLLBACK: kind.grammar_class.rollback,
            glue.RESET: kind.grammar_class.reset,
            glue.FILL: kind.grammar_class.fill_bitmask,
        }
        self.stock, self.backend = stock, SimpleNamespace()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settings, "_current", settings.Settings(row_cache_mb=budget_mb))
            self.ours = glue.build(Context(matched(kind.name), stock, self.failures.append, lambda: proves))
        self.counts = telemetry.counters(kind.name)

    def matcher(self, regex: str, backend=None):
        """A matcher of ours, its network built, or its history begun."""
        grammar = self.ours[self.kind.glue.COMPILE](backend or self.backend, "regex", regex)
        request = grammar._speedups
        request.grammar.dear = True
        if request.source and request.grammar.network is None:
            request.tracker.build(request.grammar, request.source)
        return grammar

    def call(self, path: str, ours, *arguments):
        return self.ours[path](ours, *arguments)

    def row(self, methods: dict, grammar) -> torch.Tensor:
        bitmask = torch.zeros((2, (self.kind.size + 31) // 32), dtype=torch.int32)
        methods[self.kind.glue.FILL](grammar, bitmask, 1)
        return bitmask[1]

    def hits_in(self, grammar) -> int:
        """How many rows one fill takes from the cache: 0 or 1."""
        before = self.counts["hits"]
        self.row(self.ours, grammar)
        return self.counts["hits"] - before


@pytest.fixture(params=[Guidance, XGrammar], ids=["guidance", "xgrammar"], scope="module")
def installed(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "EXPENSIVE", -1.0)
        yield Installed(request.param)


def has_ended_unsaid(kind, grammar) -> bool:
    """Whether a matcher has ended and its grammar does not say so: before 0.29, where a token after the end was refused."""
    return kind is XGrammar and grammar.matcher.is_terminated() and not grammar.is_terminated()


def state(grammar) -> tuple:
    return (
        grammar.is_terminated(),
        getattr(grammar, "num_processed_tokens", None),
        getattr(grammar, "rollback_lag", None),
    )


@given(seed=st.integers(0, 2**32), regex=st.sampled_from(REGEXES))
@hypothesis_settings(max_examples=60, deadline=None)
def test_rows_and_answers_are_stocks_through_everything_vllm_does(installed, seed, regex):
    glue, chance = installed.kind.glue, random.Random(seed)
    stock, ours, held = installed.kind.compiled(regex), installed.matcher(regex), 0
    both = ((installed.stock, stock), (installed.ours, ours))
    for step in range(40):
        action = chance.random()
        if stock.is_terminated() or action < 0.15:
            back = chance.randint(1, held) if held else 0
            for methods, grammar in both:
                methods[glue.ROLLBACK](grammar, back)
            held -= back
        elif action < 0.2:
            for methods, grammar in both:
                methods[glue.RESET](grammar)
            held = 0
        if stock.is_terminated():
            break
        if has_ended_unsaid(installed.kind, stock):
            for methods, grammar in both:
                with pytest.raises(RuntimeError):
                    installed.row(methods, grammar)
            break
        rows = [installed.row(methods, grammar) for methods, grammar in both]
        assert torch.equal(*rows), (regex, step)
        allowed = allowed_ids(rows[0].numpy(), installed.kind.size).tolist()
        refused = action > 0.97
        token = (installed.kind.size - 2) if refused else chance.choice(allowed)
        tokens = [token, *chance.choices([97, 98, 99, installed.kind.eos], k=chance.choice([0, 0, 0, 1, 2]))]
        answers = [methods[glue.ACCEPT](grammar, "request", tokens) for methods, grammar in both]
        assert answers[0] == answers[1] and state(stock) == state(ours)
        held = stock.num_processed_tokens if installed.kind is XGrammar else held + len(tokens) * answers[0]
        if not answers[0] and installed.kind is Guidance:
            # An llguidance matcher that refused a token is broken: one more row, and its life is over.
            assert torch.equal(*(installed.row(methods, grammar) for methods, grammar in both))
            break
    assert installed.failures == []


def walk(installed, grammar, text: bytes) -> None:
    for token in text:
        installed.row(installed.ours, grammar)
        assert installed.call(installed.kind.glue.ACCEPT, grammar, "request", [token])
    installed.row(installed.ours, grammar)


def test_another_request_finds_the_rows_of_the_first(installed):
    walk(installed, installed.matcher("a(b|c)*d"), b"abcb")
    other = installed.matcher("a(b|c)*d")
    before = installed.counts["hits"]
    walk(installed, other, b"abcb")
    assert installed.counts["hits"] - before == 5


def test_a_matcher_rolled_back_goes_on_from_where_it_then_is(installed):
    grammar, fresh = installed.matcher("x(a|b)*y"), installed.kind.compiled("x(a|b)*y")
    walk(installed, grammar, b"xab")
    installed.call(installed.kind.glue.ROLLBACK, grammar, 3)
    assert installed.hits_in(grammar) == 1
    assert torch.equal(installed.row(installed.ours, grammar), installed.row(installed.stock, fresh))
    before = installed.counts["hits"]
    walk(installed, grammar, b"xab")
    assert installed.counts["hits"] - before == 4


def test_a_matcher_that_was_reset_begins_anew(installed):
    grammar, fresh = installed.matcher("z(a|b)*y"), installed.kind.compiled("z(a|b)*y")
    walk(installed, grammar, b"zab")
    installed.call(installed.kind.glue.RESET, grammar)
    # llguidance's own reset is not a whole one: stock fills from then on.
    assert installed.hits_in(grammar) == (installed.kind is XGrammar)
    assert torch.equal(installed.row(installed.ours, grammar), installed.row(installed.stock, fresh))


@pytest.mark.parametrize("installed", [Guidance], indirect=True, ids=["guidance"])
@pytest.mark.parametrize(
    "events",
    [
        pytest.param([("accept", b"\0\0\0"), ("back", 1)], id="several ends at once"),
        pytest.param([("validate", [10**6])], id="a token outside of the vocabulary"),
        pytest.param([("accept", b"ab"), ("reset", None)], id="a reset"),
    ],
)
def test_matchers_that_llguidance_leaves_in_an_odd_place_are_stocks(installed, events):
    methods, regex = (installed.stock, installed.ours), "(ab|cd)*"
    walk(installed, installed.matcher(regex), b"abcd")
    ended = installed.matcher(regex)
    for _ in range(2):
        installed.call(installed.kind.glue.ACCEPT, ended, "request", [installed.kind.eos] * 2)
        installed.row(installed.ours, ended)
    grammars, glue = (installed.kind.compiled(regex), installed.matcher(regex)), installed.kind.glue
    for what, value in events:
        for own, grammar in zip(methods, grammars):
            if what == "accept":
                tokens = [byte or installed.kind.eos for byte in value]
                own[glue.ACCEPT](grammar, "request", tokens)
            elif what == "back":
                own[glue.ROLLBACK](grammar, value)
            elif what == "validate":
                grammar.validate_tokens(value)
            else:
                own[glue.RESET](grammar)
    for _ in range(2):
        assert torch.equal(*(installed.row(own, grammar) for own, grammar in zip(methods, grammars)))


def test_backends_share_nothing(installed):
    walk(installed, installed.matcher("w(a|b)*"), b"wa")
    other = installed.matcher("w(a|b)*", backend=SimpleNamespace())
    assert installed.hits_in(other) == 0


def test_no_network_is_built_by_an_xgrammar_patch_whose_probe_fails():
    patched = Installed(XGrammar, proves=False)
    grammar = patched.ours[XGrammar.glue.COMPILE](patched.backend, "regex", "u(a|b)*")
    request = grammar._speedups
    request.tracker.build(request.grammar, request.source)
    assert request.grammar.network is None and "off" in request.grammar.reason
    assert patched.hits_in(grammar) == patched.hits_in(grammar) == 0


@pytest.mark.parametrize("installed", [XGrammar], indirect=True, ids=["xgrammar"])
def test_a_matcher_that_was_moved_past_us_is_filled_by_stock(installed):
    grammar, stock = installed.matcher("va?b?c"), installed.kind.compiled("va?b?c")
    walk(installed, grammar, b"v")
    assert installed.hits_in(grammar) == 1
    for one in (grammar, stock):
        for token in b"va"[0 if one is stock else 1 :]:
            installed.stock[installed.kind.glue.ACCEPT](one, "request", [token])
    assert installed.hits_in(grammar) == 0
    assert torch.equal(installed.row(installed.ours, grammar), installed.row(installed.stock, stock))


class Budgets(XGrammar):
    """Grammars with a rule of so many tokens at most: filling a row decides what the matcher does next."""

    @classmethod
    def compiled(cls, text: str):
        compiled = cls.compiler.compile_grammar(text)
        return xgrammar.XgrammarGrammar(cls.size, xgr.GrammarMatcher(compiled, max_rollback_tokens=200), compiled)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_rule_with_a_budget_is_filled_by_stock_every_time(budget):
    patched, text = Installed(Budgets), f'root ::= a b\na[max_tokens={budget}] ::= [a-z]*\nb ::= [a-z]{{1,9}} "."'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "EXPENSIVE", -1.0)
        for seed in [*range(5)] * 3:
            stock, ours, chance = Budgets.compiled(text), patched.matcher(text), random.Random(seed)
            while not stock.is_terminated():
                rows = [patched.row(patched.stock, stock), patched.row(patched.ours, ours)]
                assert torch.equal(*rows)
                token = chance.choice(allowed_ids(rows[0].numpy(), Budgets.size).tolist())
                for methods, grammar in ((patched.stock, stock), (patched.ours, ours)):
                    assert methods[Budgets.glue.ACCEPT](grammar, "request", [token])
                assert state(stock) == state(ours)
    assert "budget" in ours._speedups.grammar.reason and patched.failures == []


def resident() -> int:
    """What this process holds, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_flat_over_a_thousand_grammars():
    patched, held = Installed(XGrammar, budget_mb=0.5), []
    before = dict(patched.counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "ACCOUNT_EVERY", 1)
        for number in range(1000):
            grammar = patched.matcher(f"(x{number}|y[a-f]{{1,9}}|z)*")
            walk(patched, grammar, f"x{number}yabcz".encode())
            held.append(resident())
            tracker = grammar._speedups.tracker
            assert tracker.nbytes <= tracker.budget and tracker.rows.nbytes <= tracker.rows.budget
    done = {name: count - before.get(name, 0) for name, count in patched.counts.items()}
    assert done["networks built"] == 1000 and done["networks forgotten"] > 900
    assert done["evictions"] > 0 and patched.failures == []
    assert held[-1] - held[300] < 4 * 2**20


@pytest.mark.skipif(matched("xgrammar-states") != xgrammar_states.TWO_COMPILERS, reason="this vLLM has one compiler")
def test_a_network_reads_the_vocabulary_of_the_compiler_that_its_grammar_came_from():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<call>"])
    options = SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
    config = SimpleNamespace(structured_outputs_config=options, model_config=None, speculative_config=None)
    backend = xgrammar.XgrammarBackend(config, tokenizer=fast, vocab_size=len(fast))
    patched = Installed(XGrammar)
    patched.ours = xgrammar_states.build(
        Context(
            xgrammar_states.TWO_COMPILERS,
            {**patched.stock, XGrammar.glue.COMPILE: xgrammar.XgrammarBackend.compile_grammar},
            patched.failures.append,
        )
    )
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "a*"}}
    seen = []
    for kind, text in (
        (Kind.JSON, '{"type": "string"}'),
        (Kind.REGEX, "a*"),
        (Kind.GRAMMAR, 'root ::= "a"*'),
        (Kind.GRAMMAR, 'start: "a"*'),
        (Kind.STRUCTURAL_TAG, json.dumps(tag)),
    ):
        grammar = patched.ours[XGrammar.glue.COMPILE](backend, kind, text)
        _, vocabulary = grammar._speedups.source()
        assert [vocabulary[token] for token in range(len(vocabulary))] == grammar.ctx.tokenizer_info.decoded_vocab
        seen.append(vocabulary)
    assert seen[0] is seen[1] is seen[2] and seen[3] is seen[4] and seen[0] is not seen[3]
    assert patched.failures == []
