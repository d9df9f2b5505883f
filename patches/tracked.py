"""Glue that the patches of several backends share: numbering backends, and filling rows through a tracked request."""

from __future__ import annotations

import hashlib
import itertools
import time

import numpy as np

from vllm_speedups import settings
from vllm_speedups.masks.rows import RowCache
from vllm_speedups.masks.tracking import Arrays, Tracker
from vllm_speedups.telemetry import gauge

_serials = itertools.count()


def serial_of(backend: object) -> int:
    """The number of a backend, unique in the process: the part of a grammar's key that stands for its vocabulary."""
    serial = backend.__dict__.get("_speedups_serial")
    if serial is None:
        # Grammars are compiled on several threads: the first number that was set is the backend's.
        serial = backend.__dict__.setdefault("_speedups_serial", next(_serials))
    return serial


def given(stop_token_ids) -> tuple:
    """The third argument of `compile_grammar`, which releases before 0.28 do not have, where it was given."""
    return () if stop_token_ids is None else (stop_token_ids,)


def row_budget() -> int:
    """The bytes that rows may take, from VLLM_SPEEDUPS_ROW_CACHE_MB."""
    return int(settings.current().row_cache_mb * 2**20)


def tracker(patch: str, counts: dict) -> Tracker:
    """A patch's tracker with a row cache of its own. Networks and tries get a quarter of the rows' budget beside it."""
    made = Tracker(RowCache(row_budget(), counts), int(row_budget() / 4), counts)
    gauge(patch, "bytes", lambda: made.nbytes + made.rows.nbytes)
    gauge(patch, "grammars", lambda: len(made))
    return made


def check_row(context, stock_fill, grammar, bitmask, idx: int, row: np.ndarray, key: tuple, state, tokens) -> None:
    """Have stock fill row `idx` and compare `row`, which came from the cache under `key` and `state`, with it."""
    stock_fill(grammar, bitmask, idx)
    filled = bitmask.numpy()[idx]
    if np.array_equal(filled, row):
        return
    kind, specification = key[1], str(key[2])
    words = np.flatnonzero(filled != row)
    facts = {
        "grammar": f"{kind}, {len(specification)} characters, "
        f"sha256 {hashlib.sha256(specification.encode(errors='surrogatepass')).hexdigest()}",
        "state": repr(state),
        "words that differ": f"{len(words)} of {len(row)}, the first at {words[0]}",
        "stock": int(filled[words[0]]),
        "ours": int(row[words[0]]),
    }
    context.differed(facts, {"specification": specification, "tokens": None if tokens is None else list(tokens)})


def fill_through(stock_fill, counts: dict, context, in_step, broken):
    """The `fill_bitmask(self, bitmask, idx)` of a grammar class whose instances carry a `Request` as `_speedups`.

    `in_step(grammar, request)`: whether the request still knows what the matcher holds; stock fills where it does not.
    `broken(grammar)`: whether the matcher broke down while it filled; its rows are then not those of its tokens.
    """
    clock, array_of = time.perf_counter, Arrays()
    failed, verifies = context.failed, context.verifies

    def fill_bitmask(self, bitmask, idx):
        request = self.__dict__.get("_speedups")
        if request is None:
            return stock_fill(self, bitmask, idx)
        if request.waits:
            request.waits -= 1
            return stock_fill(self, bitmask, idx)
        if not in_step(self, request):
            return stock_fill(self, bitmask, idx)
        try:
            row = request.look_up()
            if row is not None:
                array = array_of(bitmask)
                if len(row) == array.shape[1]:
                    array[idx] = row
                    counts["hits"] += 1
                    if verifies is None or not verifies():
                        return None
                    grammar = request.grammar
                    place = request.state.number, request.trail.tokens
                    return check_row(context, stock_fill, self, bitmask, idx, row, grammar.key, *place)
        except Exception as error:
            del self._speedups
            stock_fill(self, bitmask, idx)
            failed(error)
            return None
        start = clock()
        stock_fill(self, bitmask, idx)
        seconds = clock() - start
        try:
            counts["misses"] += 1
            if broken(self):
                del self._speedups
            else:
                request.filled(array_of(bitmask)[idx], seconds)
        except Exception as error:
            self.__dict__.pop("_speedups", None)
            failed(error)
        return None

    return fill_bitmask
