"""Glue of `xgrammar-states`: rows of the xgrammar backend cached under state ids taken from its own automaton."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from functools import lru_cache

import torch

from vllm_speedups.masks.packed import allowed_ids
from vllm_speedups.masks.printed import parse_printed
from vllm_speedups.masks.rows import RowCache
from vllm_speedups.masks.serialized import Automaton, Unsupported, Vocabulary, parse
from vllm_speedups.masks.tracking import Request, Tracker
from vllm_speedups.patches.tracked import fill_through, given, serial_of, tracker
from vllm_speedups.patching import Declined
from vllm_speedups.telemetry import counters

MODULE = "vllm.v1.structured_output.backend_xgrammar"
COMPILE = f"{MODULE}:XgrammarBackend.compile_grammar"
ACCEPT = f"{MODULE}:XgrammarGrammar.accept_tokens"
ROLLBACK = f"{MODULE}:XgrammarGrammar.rollback"
RESET = f"{MODULE}:XgrammarGrammar.reset"
FILL = f"{MODULE}:XgrammarGrammar.fill_bitmask"

# The form in which a backend has a compiler with, and one without, special tokens in its vocabulary.
TWO_COMPILERS = "matcher and compiled grammar kept, two compilers"

# The probe runs where the first network is built: no request waits for it.
PROVES_LATER = True

# Characters of serialised form, roughly, past which the printed form is read instead: some 0.3 s to serialise.
LONG = 4_000_000


def automaton_of(compiled) -> Automaton:
    """The automaton of a compiled grammar. Takes from one to some hundred milliseconds, most of them outside the GIL.

    Raises Unsupported for a grammar that state ids cannot express.
    """
    rules = str(compiled.grammar)
    # Each rule carries a copy of the whole automaton, which takes some six characters for one of the grammar's text.
    if 6 * len(rules) * rules.count(" ::= ") < LONG:
        return parse(compiled.grammar.serialize_json())
    if not _printed_agrees():
        raise Unsupported("its serialised form would be too long")
    return _printed(compiled, rules)


def _printed(compiled, rules: str) -> Automaton:
    from xgrammar import testing

    automata = testing._print_grammar_fsms(compiled.grammar)
    return parse_printed(rules, automata, testing._get_allow_empty_rule_ids(compiled))


@lru_cache(None)
def _printed_agrees() -> bool:
    """Whether the printed form of this xgrammar reads as its serialised form does, every byte included."""
    import xgrammar as xgr

    try:
        info = xgr.TokenizerInfo([b"a", b"</s>"], vocab_type=xgr.VocabType.RAW, stop_token_ids=[1])
        bytes_ = " | ".join(f'"\\x{byte:02x}"' for byte in range(1, 128))
        compiled = xgr.GrammarCompiler(info, max_threads=1).compile_grammar(
            f'root ::= {bytes_} | [\u00e0-\U0001f600] | [^a-z] | x* "." | (x){{0,400}}\nx ::= "a" | "\u65e5" root "b"'
        )
        return parse(compiled.grammar.serialize_json()) == _printed(compiled, str(compiled.grammar))
    except Exception:
        return False


def vocabulary_of(info) -> Vocabulary:
    """The vocabulary of an `xgrammar.TokenizerInfo`."""
    try:
        # The array behind `decoded_vocab`, which would make a list of it.
        tokens = info._handle.decoded_vocab()
    except AttributeError:
        tokens = info.decoded_vocab
    return Vocabulary(tokens, info.serialize_json)


class _Words:
    """The vocabularies of one backend, each taken when a network over it is built first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict = {}

    def of(self, compiled, compiler: str) -> Vocabulary:
        """The vocabulary of a compiled grammar, which is that of the backend's `compiler` it comes from."""
        with self._lock:
            if compiler not in self._known:
                self._known[compiler] = vocabulary_of(compiled.tokenizer_info)
            return self._known[compiler]


def _only_compiler(request_type, grammar_spec: str) -> str:
    return "compiler"


def _one_of_two_compilers(request_type, grammar_spec: str) -> str:
    """Which of its two compilers a backend of vLLM 0.33 takes: special tokens are text in structural tags and Lark only."""
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    lark = request_type == StructuredOutputOptions.GRAMMAR and grammar_is_likely_lark(grammar_spec)
    return "full_vocab_compiler" if lark or request_type == StructuredOutputOptions.STRUCTURAL_TAG else "compiler"


def build(context) -> dict:
    """The five methods, around one tracker and one row cache a process."""
    stock_compile, stock_accept, stock_rollback, stock_reset, stock_fill = (
        context.stock[path] for path in (COMPILE, ACCEPT, ROLLBACK, RESET, FILL)
    )
    counts = counters("xgrammar-states")
    grammars = tracker("xgrammar-states", counts)
    compiler_of = _one_of_two_compilers if context.form == TWO_COMPILERS else _only_compiler

    def compile_grammar(self, request_type, grammar_spec, stop_token_ids=None):
        grammar = stock_compile(self, request_type, grammar_spec, *given(stop_token_ids))
        try:
            if not context.intact(type(grammar)):
                # Whose methods are somebody's may move its matcher past us.
                return grammar
            words = self.__dict__.get("_speedups_words") or self.__dict__.setdefault("_speedups_words", _Words())
            compiled = grammar.ctx
            key = (serial_of(self), request_type, grammar_spec, frozenset(stop_token_ids or ()))

            def source() -> tuple:
                # On the thread that builds networks: until then everything is stock's.
                if not context.prove():
                    raise Unsupported("the patch is off")
                return automaton_of(compiled), words.of(compiled, compiler_of(request_type, grammar_spec))

            grammar._speedups = Request(grammars, grammars.grammar(key), source)
        except Exception as error:
            context.failed(error)
        return grammar

    def accept_tokens(self, request_id, tokens):
        request = self.__dict__.get("_speedups")
        if request is None:
            return stock_accept(self, request_id, tokens)
        before = self.num_processed_tokens
        accepted = stock_accept(self, request_id, tokens)
        count = self.num_processed_tokens - before
        if accepted:
            # What stock took before it ended counts, no more.
            request.trail.tokens.extend(tokens if count == len(tokens) else tokens[:count])
        elif count:
            # Before 0.29 it may have ended before the token that it refused, and does not say so.
            del self._speedups
        return accepted

    def rollback(self, num_tokens):
        request = self.__dict__.get("_speedups")
        before = self.num_processed_tokens
        stock_rollback(self, num_tokens)
        if request is not None:
            request.trail.rollback(before - self.num_processed_tokens)

    def reset(self):
        request = self.__dict__.get("_speedups")
        stock_reset(self)
        if request is not None:
            request.trail.reset()

    def in_step(self, request):
        # Stock raises for a matcher that has ended; and whoever moved the matcher past us made our count wrong.
        return not self._is_terminated and len(request.trail.tokens) == self.num_processed_tokens

    fill_bitmask = fill_through(stock_fill, counts, context, in_step, lambda grammar: False)
    return {COMPILE: compile_grammar, ACCEPT: accept_tokens, ROLLBACK: rollback, RESET: reset, FILL: fill_bitmask}


# Every byte, and tokens that span rules: enough to walk counts, recursion and code points.
_PROBE_WORDS = [
    *(bytes([i]) for i in range(256)),
    b"ab",
    b"aaaa",
    b'":"',
    b'"}',
    "é".encode(),
    b"\xa9a",
    b"((",
    b"))",
    b"</s>",
]
_PROBE_GRAMMARS = (
    'root ::= "a" {130,400} "b" | "(" root ")" | "\\"" [^"]{0,3} "\\"" root | "\u00e9" [a-b]*',
    'root ::= p ("," p)*\np ::= "ab" | "a" p | ""',
)


def probe(context, replacements) -> None:
    """Two matchers a grammar, one driven by stock and one by us: rows must be equal, through rollback and reset.

    Also that the network is read and walked at all: state ids that never come again would be right, and useless.
    """
    import xgrammar as xgr
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    info = xgr.TokenizerInfo(_PROBE_WORDS, vocab_type=xgr.VocabType.RAW, stop_token_ids=[len(_PROBE_WORDS) - 1])
    compiler = xgr.GrammarCompiler(info, max_threads=1)
    vocabulary = vocabulary_of(info)
    if [vocabulary[token] for token in range(len(vocabulary))] != _PROBE_WORDS or vocabulary.longest != 4:
        raise Declined("the vocabulary that xgrammar shows is not the one that it was given")
    compiled = [compiler.compile_grammar(text) for text in _PROBE_GRAMMARS]
    compiled.append(
        compiler.compile_json_schema(json.dumps({"type": "array", "items": {"type": ["string", "number"]}}))
    )
    for number, one in enumerate(compiled):
        grammars = Tracker(RowCache(2**24), 2**24, defaultdict(int))
        known = grammars.grammar(number)
        grammars.build(known, lambda one=one: (parse(one.grammar.serialize_json()), vocabulary))  # type: ignore[misc]
        if known.network is None:
            raise Declined(f"its probe grammar {number} has no state ids: {known.reason}")
        hits = 0
        for path in range(4):
            stock, ours = (XgrammarGrammar(info.vocab_size, xgr.GrammarMatcher(one), one) for _ in range(2))
            ours._speedups = Request(grammars, known)
            for step in range(32):
                masks = [xgr.allocate_token_bitmask(2, info.vocab_size) for _ in range(2)]
                context.stock[FILL](stock, masks[0], 1)
                rows = len(known.rows.rows)
                replacements[FILL](ours, masks[1], 1)
                hits += len(known.rows.rows) == rows
                if not torch.equal(*masks):
                    raise Declined(
                        f"its probe found another row than stock's (grammar {number}, path {path}, step {step})"
                    )
                allowed = allowed_ids(masks[0][1].numpy(), info.vocab_size).tolist()
                tokens = [allowed[(7 * path + 3 * step * path + step) % len(allowed)]] if allowed else [0]
                answers = [
                    (fills[ACCEPT](grammar, "probe", tokens), grammar.is_terminated(), grammar.num_processed_tokens)
                    for grammar, fills in ((stock, context.stock), (ours, replacements))
                ]
                if answers[0] != answers[1]:
                    raise Declined(
                        f"its probe found another answer than stock's (grammar {number}, path {path}, step {step})"
                    )
                back = 2 if step % 9 == 8 else int(stock.is_terminated())
                for grammar, fills in ((stock, context.stock), (ours, replacements)):
                    if back and grammar.num_processed_tokens >= back:
                        fills[ROLLBACK](grammar, back)
                    if step == 24:
                        fills[RESET](grammar)
        if not hits:
            raise Declined(f"its probe grammar {number} never came to a state twice")
