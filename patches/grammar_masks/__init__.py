"""Glue of `grammar-masks`: where vLLM's V1 workers apply the scheduler's bitmask to the logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from vllm_speedups import settings
from vllm_speedups.masks.apply import MaskApplier
from vllm_speedups.masks.cuda import CudaMasks, usable
from vllm_speedups.masks.device import VIEWS
from vllm_speedups.masks.packed import WORD, words_for
from vllm_speedups.patching import Declined
from vllm_speedups.telemetry import counters, gauge

TARGET = "vllm.v1.structured_output.utils:apply_grammar_bitmask"
# The form in which every request has the same number of rows in the bitmask, whatever it speculates in this step.
STRIDED = "module function, rows at a stride"


def build(context) -> dict:
    """The replacement of `apply_grammar_bitmask`, with a mask cache of its own."""
    stock = context.stock[TARGET]
    counts = counters("grammar-masks")
    budget = int(settings.current().mask_cache_mb * 2**20)
    applier = MaskApplier(budget, counts)
    gauge("grammar-masks", "bytes", lambda: applier.table.nbytes)
    gauge("grammar-masks", "masks", lambda: len(applier.table))
    cuda = CudaMasks(budget, counts) if settings.current().cuda_masks else None
    strided, warned = context.form == STRIDED, False
    verifies = context.verifies

    def placed(scheduler_output, grammar_output, input_batch) -> tuple:
        rows, guided = grammar_output.grammar_bitmask, grammar_output.structured_output_request_ids
        stride = len(rows) // len(guided) if strided else None
        places, indices = _places(scheduler_output.scheduled_spec_decode_tokens, guided, input_batch.req_ids, stride)
        if places != list(range(len(rows))):
            rows = rows[places]
        return np.ascontiguousarray(rows), indices

    def on_cuda(*step) -> None:
        try:
            rows, indices = placed(*step[:3])
        except Exception as error:
            stock(*step)
            context.failed(error)
            return
        if not cuda.apply(step[3], rows, indices, lambda: stock(*step)):
            counts["left to stock"] += 1
            stock(*step)

    def apply_grammar_bitmask(scheduler_output, grammar_output, input_batch, logits):
        nonlocal warned
        step = scheduler_output, grammar_output, input_batch, logits
        rows, way = grammar_output.grammar_bitmask, masked
        if cuda is not None and usable(logits):
            way = on_cuda
        elif not applier.supports(logits) or rows.dtype != np.int32:
            counts["left to stock"] += 1
            return stock(*step)
        elif not warned and rows.shape[1] * WORD < logits.shape[1]:
            # xgrammar tells the user, once, that some logits are past the bitmask: let it.
            warned = True
            return stock(*step)
        return way(*step) if verifies is None or not verifies() else checked(way, *step)

    def checked(way, scheduler_output, grammar_output, input_batch, logits):
        """Ours on the logits, stock on a copy of them: stock's bits are what stays."""
        expected = _copy(logits)
        way(scheduler_output, grammar_output, input_batch, logits)
        stock(scheduler_output, grammar_output, input_batch, expected)
        ours, theirs = (one.detach().view(VIEWS[logits.dtype]) for one in (logits, expected))
        if torch.equal(ours, theirs):
            return
        # A half NaN may come back from stock's float32 with other bits: still NaN.
        different = (ours != theirs) & ~(logits.isnan() & expected.isnan())
        if different.any():
            row, column = different.nonzero()[0].tolist()
            facts = {
                "logits": f"{logits.dtype} {tuple(logits.shape)}, strides {logits.stride()}",
                "first that differs": [row, column],
                "stock": hex(int(theirs[row, column])),
                "ours": hex(int(ours[row, column])),
                "rows": list(grammar_output.grammar_bitmask.shape),
            }
            logits.copy_(expected)
            requests = {
                "guided": list(grammar_output.structured_output_request_ids),
                "batch": list(input_batch.req_ids),
                "speculative tokens": dict(scheduler_output.scheduled_spec_decode_tokens),
                "bitmask": grammar_output.grammar_bitmask.tolist(),
            }
            context.differed(facts, requests)

    def masked(*step):
        try:
            applier.apply(step[3], *placed(*step[:3]))
        except Exception as error:
            # Counted only where stock does not raise too.
            stock(*step)
            context.failed(error)

    return {TARGET: apply_grammar_bitmask}


def _copy(logits: torch.Tensor) -> torch.Tensor:
    """A copy, with room behind it: where logits end inside of a word, xgrammar 0.2.8's kernel may write past them."""
    buffer = torch.empty(logits.numel() + 2 * WORD, dtype=logits.dtype, device=logits.device)
    copy = buffer[: logits.numel()].view(logits.shape)
    copy.copy_(logits.detach())
    return copy


def _places(spec_tokens: dict, guided: list, req_ids: list, stride: int | None) -> tuple:
    """Which bitmask rows meet which rows of logits: two lists of equal length.

    The bitmask holds the guided requests in the scheduler's order, each with a row for every speculative token and one
    more, and `stride` rows in all where that is given; the logits hold all requests in the worker's order. A request that
    left the worker's batch has no logits.
    """
    first_logit, position = {}, 0
    for req_id in req_ids:
        first_logit[req_id] = position
        position += 1 + len(spec_tokens.get(req_id, ()))
    places, indices, row = [], [], 0
    for req_id in guided:
        count = 1 + len(spec_tokens.get(req_id, ()))
        if req_id in first_logit:
            places.extend(range(row, row + count))
            indices.extend(range(first_logit[req_id], first_logit[req_id] + count))
        row += stride or count
    return places, indices


def probe(context, replacements) -> None:
    """Stock and replacement on a small batch with a guided, an unguided and a speculating request, in three dtypes."""
    # Whole words: where the logits end inside of one, xgrammar 0.2.8's kernel may write past them.
    vocab_size = 4 * WORD
    random = np.random.default_rng(0)
    rows = random.integers(-(2**31), 2**31, (4, words_for(vocab_size)), dtype=np.int64).astype(np.int32)
    rows[1], rows[2] = 0, -1
    rows[1, 0] = 2
    requests = ["guided", "unguided", "speculating"]
    arguments = (
        SimpleNamespace(scheduled_spec_decode_tokens={"speculating": [1, 2]}),
        SimpleNamespace(grammar_bitmask=rows, structured_output_request_ids=["speculating", "guided"]),
        SimpleNamespace(req_ids=requests),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.from_numpy(random.standard_normal((5, vocab_size), dtype=np.float32)).to(dtype)
        expected, got = logits.clone(), logits.clone()
        context.stock[TARGET](*arguments, expected)
        replacements[TARGET](*arguments, got)
        if not torch.equal(expected, got):
            raise Declined(f"its probe found other logits than stock's ({dtype})")
