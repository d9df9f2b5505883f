"""Glue of `guidance-history`: expensive rows of the guidance backend kept under the exact tokens that led to them."""

from __future__ import annotations

import itertools
import time

import torch

from vllm_speedups import settings
from vllm_speedups.masks.packed import words_for
from vllm_speedups.masks.rows import RowCache
from vllm_speedups.masks.tracking import EXPENSIVE, Arrays, Request, Tracker
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
    megabytes = settings.current().row_cache_mb
    tracker = Tracker(RowCache(int(megabytes * 2**20), counts), int(megabytes * 2**20 / 4), counts)
    serials = itertools.count()
    clock, array_of = time.perf_counter, Arrays()

    def compile_grammar(self, request_type, grammar_spec, stop_token_ids=None):
        grammar = stock_compile(self, request_type, grammar_spec, stop_token_ids)
        try:
            serial = self.__dict__.get("_speedups_serial")
            if serial is None:
                serial = self.__dict__.setdefault("_speedups_serial", next(serials))
            # The tokenizer belongs to the backend; stop tokens play no part in an llguidance matcher.
            grammar._speedups = Request(tracker, tracker.grammar((serial, request_type, grammar_spec)))
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
            if accepted:
                request.trail.tokens.extend(tokens)
            else:
                # How many of the tokens a matcher took before it refused one, it does not say.
                del self._speedups
        return accepted

    def rollback(self, num_tokens):
        request = self.__dict__.get("_speedups")
        count = num_tokens - self.rollback_lag
        stock_rollback(self, num_tokens)
        if request is not None and num_tokens > 0:
            request.trail.rollback(count)

    def reset(self):
        request = self.__dict__.get("_speedups")
        stock_reset(self)
        if request is not None:
            request.trail.reset()

    def fill_bitmask(self, bitmask, idx):
        request = self.__dict__.get("_speedups")
        if request is None:
            return stock_fill(self, bitmask, idx)
        try:
            row = request.look_up()
            if row is not None:
                array = array_of(bitmask)
                if len(row) == array.shape[1]:
                    array[idx] = row
                    counts["hits"] += 1
                    return None
        except Exception as error:
            del self._speedups
            context.failed(error)
            return stock_fill(self, bitmask, idx)
        start = clock()
        stock_fill(self, bitmask, idx)
        seconds = clock() - start
        try:
            counts["misses"] += 1
            if seconds >= EXPENSIVE and self.ll_matcher.is_error():
                # A matcher that broke down allows only the end of the text, and not for what it was given.
                del self._speedups
            else:
                request.filled(array_of(bitmask)[idx], seconds)
        except Exception as error:
            self.__dict__.pop("_speedups", None)
            context.failed(error)
        return None

    return {COMPILE: compile_grammar, ACCEPT: accept_tokens, ROLLBACK: rollback, RESET: reset, FILL: fill_bitmask}


def probe(context, replacements) -> None:
    """Two matchers over one tokenizer, one driven by stock and one by us, with every row kept: rows must be equal."""
    import llguidance
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

    tokenizer = llguidance.LLTokenizer("byte")
    size, eos = tokenizer.vocab_size, tokenizer.eos_token
    specification = llguidance.grammar_from("regex", "(ab|ac?)+b")
    tracker = Tracker(RowCache(2**20), 2**20, counters("guidance-history probe"))
    known = tracker.grammar("probe")
    known.dear = True
    for path in (b"abb", b"acab", b"ab", b"abz", b"aaaab"):
        # Level 0, and errors marked as printed: a refused token is part of the probe, and no news to the user.
        matchers = [llguidance.LLMatcher(tokenizer, specification, log_level=0) for _ in range(2)]
        stock, ours = (GuidanceGrammar(matcher, tokenizer, size, printed_error=True) for matcher in matchers)
        ours._speedups = Request(tracker, known)
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
