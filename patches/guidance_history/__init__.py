"""Glue of `guidance-history`: expensive rows of the guidance backend kept under the exact tokens that led to them."""

from __future__ import annotations

from collections import defaultdict

import torch

from vllm_speedups.masks.packed import words_for
from vllm_speedups.masks.rows import RowCache
from vllm_speedups.masks.tracking import EXPENSIVE, Request, Tracker
from vllm_speedups.patches.tracked import fill_through, given, serial_of, tracker
from vllm_speedups.patching import Declined
from vllm_speedups.telemetry import counters

MODULE = "vllm.v1.structured_output.backend_guidance"
COMPILE = f"{MODULE}:GuidanceBackend.compile_grammar"
ACCEPT = f"{MODULE}:GuidanceGrammar.accept_tokens"
ROLLBACK = f"{MODULE}:GuidanceGrammar.rollback"
RESET = f"{MODULE}:GuidanceGrammar.reset"
FILL = f"{MODULE}:GuidanceGrammar.fill_bitmask"


def build(context) -> dict:
    """The five methods, around one tracker and one row cache a process."""
    stock_compile, stock_accept, stock_rollback, stock_reset, stock_fill = (
        context.stock[path] for path in (COMPILE, ACCEPT, ROLLBACK, RESET, FILL)
    )
    counts = counters("guidance-history")
    grammars = tracker("guidance-history", counts)

    def compile_grammar(self, request_type, grammar_spec, stop_token_ids=None):
        grammar = stock_compile(self, request_type, grammar_spec, *given(stop_token_ids))
        try:
            # Whose methods are somebody's may move its matcher past us.
            if context.intact(type(grammar)):
                # The tokenizer belongs to the backend; stop tokens play no part in an llguidance matcher.
                grammar._speedups = Request(grammars, grammars.grammar((serial_of(self), request_type, grammar_spec)))
        except Exception as error:
            context.failed(error)
        return grammar

    def accept_tokens(self, request_id, tokens):
        request = self.__dict__.get("_speedups")
        if request is None:
            return stock_accept(self, request_id, tokens)
        stopped = self.ll_matcher.is_stopped()
        accepted = stock_accept(self, request_id, tokens)
        if not stopped:
            if accepted and (len(tokens) == 1 or not self.ll_matcher.is_stopped()):
                request.trail.tokens.extend(tokens)
            else:
                # How many of the tokens a matcher took before it refused one, or ended, it does not say.
                del self._speedups
        return accepted

    def rollback(self, num_tokens):
        request = self.__dict__.get("_speedups")
        # Before 0.11.1 a matcher took back as many tokens as it was told to, consumed or not.
        count = num_tokens - getattr(self, "rollback_lag", 0)
        stock_rollback(self, num_tokens)
        if request is None or num_tokens <= 0:
            return
        if self.ll_matcher.is_error():
            # Tokens behind the end are accepted and not consumed: taking back more than it holds breaks a matcher.
            del self._speedups
        else:
            request.trail.rollback(count)

    def reset(self):
        # llguidance forgets its tokens and not all that followed from them: nobody can say where it then is.
        self.__dict__.pop("_speedups", None)
        return stock_reset(self)

    def in_step(self, request):
        # Asking a matcher about a token outside of its vocabulary breaks it too.
        return not self.ll_matcher.is_error()

    def broken(self):
        # Such a matcher allows only the end of the text, and not for what it was given.
        return self.ll_matcher.is_error()

    fill_bitmask = fill_through(stock_fill, counts, context, in_step, broken)
    return {COMPILE: compile_grammar, ACCEPT: accept_tokens, ROLLBACK: rollback, RESET: reset, FILL: fill_bitmask}


def probe(context, replacements) -> None:
    """Two matchers over one tokenizer, one driven by stock and one by us, with every row kept: rows must be equal."""
    import llguidance
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

    tokenizer = llguidance.LLTokenizer("byte")
    size, eos = tokenizer.vocab_size, tokenizer.eos_token
    specification = llguidance.grammar_from("regex", "(ab|ac?)+b")
    grammars = Tracker(RowCache(2**20), 2**20, defaultdict(int))
    known = grammars.grammar("probe")
    known.dear = True
    for path in (b"abb", b"acab", b"ab", b"abz", b"aaaab"):
        # Level 0, and errors marked as printed: a refused token is part of the probe, and no news to the user.
        matchers = [llguidance.LLMatcher(tokenizer, specification, log_level=0) for _ in range(2)]
        stock, ours = (GuidanceGrammar(matcher, tokenizer, size, printed_error=True) for matcher in matchers)
        ours._speedups = Request(grammars, known)
        for step, token in enumerate([*path, eos, *path]):
            for grammar, methods in ((stock, context.stock), (ours, replacements)):
                methods[ACCEPT](grammar, "probe", [token])
            masks = [torch.zeros((2, words_for(size)), dtype=torch.int32) for _ in range(2)]
            context.stock[FILL](stock, masks[0], 1)
            request = ours.__dict__.get("_speedups")
            if request is not None and request.look_up() is None:
                request.filled(masks[0].numpy()[1], 2 * EXPENSIVE)
            replacements[FILL](ours, masks[1], 1)
            if not torch.equal(*masks) or stock.is_terminated() != ours.is_terminated():
                raise Declined(f"its probe found another row or answer than stock's after {path[: step + 1]!r}")
            if step == 2 or token == eos:
                for grammar, methods in ((stock, context.stock), (ours, replacements)):
                    methods[ROLLBACK](grammar, 1)
