"""Glue of `outlines-states`: rows of the outlines backend cached under (compiled grammar, state id)."""

from __future__ import annotations

import torch

from vllm_speedups.masks.packed import words_for
from vllm_speedups.masks.rows import RowCache
from vllm_speedups.patches.tracked import check_row, given, row_budget, serial_of
from vllm_speedups.patching import Declined
from vllm_speedups.telemetry import counters, gauge

MODULE = "vllm.v1.structured_output.backend_outlines"
COMPILE = f"{MODULE}:OutlinesBackend.compile_grammar"
ACCEPT = f"{MODULE}:OutlinesGrammar.accept_tokens"
FILL = f"{MODULE}:OutlinesGrammar.fill_bitmask"

# The form of 0.10 to 0.30, in which a grammar hands its guide whatever it is given, the end of the text too.
GUIDED = "termination left to the guide"


def build(context) -> dict:
    """The three methods, around one row cache a process."""
    stock_compile, stock_accept, stock_fill = (context.stock[path] for path in (COMPILE, ACCEPT, FILL))
    counts = counters("outlines-states")
    cache = RowCache(row_budget(), counts)
    gauge("outlines-states", "bytes", lambda: cache.nbytes)
    gauge("outlines-states", "grammars", lambda: len(cache))
    verifies, guided = context.verifies, context.form == GUIDED

    def compile_grammar(self, request_type, grammar_spec, stop_token_ids=None):
        grammar = stock_compile(self, request_type, grammar_spec, *given(stop_token_ids))
        try:
            # The vocabulary belongs to the backend; stop tokens play no part in an outlines index.
            grammar._speedups_rows = cache.grammar((serial_of(self), request_type, grammar_spec))
        except Exception as error:
            context.failed(error)
        return grammar

    def accept_tokens(self, request_id, tokens):
        """What stock does, but without a list of all allowed token ids made, and dropped, for every token."""
        rows = getattr(self, "_speedups_rows", None)
        if rows is None:
            return stock_accept(self, request_id, tokens)
        if verifies is not None and verifies():
            return checked_accept(self, request_id, tokens, rows)
        return advance(self, tokens, rows)

    def checked_accept(self, request_id, tokens, rows):
        """Advance, go back, have stock advance, and compare: stock's answer and place are what stays."""
        before = self.num_processed_tokens, has_ended(self)
        answer, error = None, None
        try:
            answer = advance(self, tokens, rows)
        except Exception as raised:
            error = raised
        ours = answer, self.num_processed_tokens, has_ended(self), self.guide.get_state()
        moved = self.num_processed_tokens - before[0] - (has_ended(self) and not before[1])
        try:
            if error is None and moved:
                self.guide.rollback_state(moved)
        except Exception:
            # More tokens than the guide keeps to go back: these cannot be checked.
            return answer
        self.num_processed_tokens = before[0]
        if not guided:
            self._is_terminated = before[1]
        answer = stock_accept(self, request_id, tokens)
        stock = answer, self.num_processed_tokens, has_ended(self), self.guide.get_state()
        if error is not None or ours != stock:
            facts = {"answer, tokens, end, state": {"stock": stock, "ours": repr(error) if error else ours}}
            context.differed(facts, {"specification": rows.key[2], "tokens": list(tokens)})
        return answer

    def advance(self, tokens, rows):
        if guided:
            return advance_guide(self, tokens, rows)
        if self._is_terminated:
            return True
        guide, ends = self.guide, self.eos_token_id in tokens
        if ends:
            tokens = tokens[: tokens.index(self.eos_token_id)]
        if tokens and not guide.accepts_tokens(tokens):
            return False
        for token in tokens:
            step(guide, token, rows)
        if ends:
            if not guide.is_finished():
                if tokens:
                    guide.rollback_state(len(tokens))
                return False
            self._is_terminated = True
        self.num_processed_tokens += len(tokens) + ends
        return True

    def advance_guide(self, tokens, rows):
        """The same for vLLM 0.10 to 0.30."""
        if not self.guide.accepts_tokens(tokens):
            return False
        for token in tokens:
            step(self.guide, token, rows)
            self.num_processed_tokens += 1
        return True

    def has_ended(self) -> bool:
        return not guided and self._is_terminated

    def fill_bitmask(self, bitmask, idx):
        rows = getattr(self, "_speedups_rows", None)
        if rows is None:
            return stock_fill(self, bitmask, idx)
        state = self.guide.get_state()
        row = rows.rows.get(state)
        if row is not None and len(row) == bitmask.shape[1]:
            bitmask.numpy()[idx] = row
            counts["hits"] += 1
            if verifies is not None and verifies():
                check_row(context, stock_fill, self, bitmask, idx, row, rows.key, state, None)
            return None
        stock_fill(self, bitmask, idx)
        counts["misses"] += 1
        try:
            row = bitmask.numpy()[idx]
            if row.any():
                # A state that allows nothing stays unknown: stock's `advance` raises there.
                rows.put(state, row)
        except Exception as error:
            context.failed(error)
        return None

    return {COMPILE: compile_grammar, ACCEPT: accept_tokens, FILL: fill_bitmask}


def step(guide, token: int, rows) -> None:
    """What stock's `guide.advance(token)` does, where `rows` are known, without the list that it makes."""
    guide.advance(token, False)
    if guide.get_state() not in rows.rows:
        # Stock's raises in a state that allows nothing; listing its tokens raises the same error.
        guide.get_tokens()


def probe(context, replacements) -> None:
    """Two grammars of one regular expression, one driven by stock and one by us, through acceptance and rollback.

    Also that compiling twice numbers the states alike, which the row cache relies on when vLLM recompiles a grammar.
    """
    import outlines_core
    from vllm.v1.structured_output.backend_outlines import OutlinesGrammar

    eos, tokens = 5, {"a": [0], "b": [1], "ab": [2, 3], "c": [4]}
    vocabulary = outlines_core.Vocabulary(eos, tokens)
    indices = [outlines_core.Index("(ab|ac?)+b", vocabulary) for _ in range(2)]
    if indices[0].get_transitions() != indices[1].get_transitions():
        raise Declined("outlines_core numbers the states of one expression differently each time")
    rows = RowCache(2**20).grammar("probe")
    for path in ([0, 1, 1, eos, 2], [3, 0, 4, 0, 1], [2, 1, 4, eos], [0, 4, 2, 1], [0, eos]):
        guides = (outlines_core.Guide(index, 8) for index in indices)
        end = {} if context.form == GUIDED else {"eos_token_id": eos}
        stock, ours = (OutlinesGrammar(vocab_size=eos + 1, guide=guide, **end) for guide in guides)
        ours._speedups_rows = rows
        for step, token in enumerate(path):
            answers, masks = [], []
            for grammar, functions in ((stock, context.stock), (ours, replacements)):
                answers.append(functions[ACCEPT](grammar, "probe", [token]))
                masks.append(torch.zeros((2, words_for(eos + 1)), dtype=torch.int32))
                functions[FILL](grammar, masks[-1], 1)
                if step == 2:
                    grammar.rollback(1)
                answers.append((grammar.num_processed_tokens, grammar.is_terminated(), grammar.guide.get_state()))
            if answers[:2] != answers[2:] or not torch.equal(*masks):
                raise Declined(f"its probe found another row or answer than stock's after {path[: step + 1]}")
