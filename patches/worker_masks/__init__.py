"""Glue of `worker-masks`: where vLLM's second model runner applies the scheduler's bitmask to the logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from vllm_speedups import settings
from vllm_speedups.masks.cuda import CudaMasks, usable
from vllm_speedups.patching import Declined
from vllm_speedups.telemetry import counters

MODULE = "vllm.v1.worker.gpu.structured_outputs"
TARGET = f"{MODULE}:StructuredOutputsWorker.apply_grammar_bitmask"
# The form in which every request has the same number of rows in the bitmask, whatever it speculates in this step.
STRIDED = "rows at a stride"

# The probe cannot launch stock's kernel on a machine's CPU: `CudaMasks` compares both on the first step instead.
PROVES_LATER = True


def build(context) -> dict:
    """The replacement of the worker's `apply_grammar_bitmask`, with resident masks for this process."""
    stock = context.stock[TARGET]
    counts = counters("worker-masks")
    cuda = CudaMasks(int(settings.current().mask_cache_mb * 2**20), counts)
    verifies = context.verifies

    def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask):
        def stocks() -> None:
            stock(self, logits, input_batch, grammar_req_ids, grammar_bitmask)

        if not grammar_req_ids or not usable(logits):
            counts["left to stock"] += 1
            return stocks()
        try:
            served = context.prove()
            targets = _targets(context, self, input_batch, grammar_req_ids)
            rows = np.ascontiguousarray(grammar_bitmask)
        except Exception as error:
            stocks()
            context.failed(error)
            return None

        def differed(facts: dict) -> None:
            private = {"guided": list(grammar_req_ids), "batch": list(input_batch.req_ids), "bitmask": rows.tolist()}
            context.differed(facts, private)

        told = differed if verifies is not None and verifies() else None
        if not served or not cuda.apply(
            logits, rows, targets, stocks, input_batch.cu_num_logits, self.mask_stride, told
        ):
            counts["left to stock"] += 1
            stocks()
        return None

    return {TARGET: apply_grammar_bitmask}


def _targets(context, worker, input_batch, grammar_req_ids: list) -> list:
    """For each row of the bitmask request * stride + position, as stock's kernel wants it. Raises KeyError."""
    if context.form != STRIDED:
        return context.stock[f"{MODULE}:_build_grammar_mapping"](
            input_batch.req_ids,
            grammar_req_ids,
            input_batch.cu_num_logits_np,
            input_batch.num_draft_tokens_per_req,
            worker.num_bonus_tokens,
            worker.mask_stride,
        )
    stride, numbers = worker.mask_stride, {name: number for number, name in enumerate(input_batch.req_ids)}
    return [numbers[name] * stride + position for name in grammar_req_ids for position in range(stride)]


def probe(context, replacements) -> None:
    """Whether rows are placed as expected in a batch of three requests, of which two are guided and one speculates."""
    batch = SimpleNamespace(
        req_ids=["guided", "unguided", "speculating"],
        cu_num_logits_np=np.array([0, 1, 2, 5], dtype=np.int32),
        num_draft_tokens_per_req=np.array([0, 0, 2], dtype=np.int32),
    )
    worker = SimpleNamespace(mask_stride=3, num_bonus_tokens=1)
    found = _targets(context, worker, batch, ["speculating", "guided"])
    expected = [6, 7, 8, 0, 1, 2] if context.form == STRIDED else [6, 7, 8, 0]
    if found != expected:
        raise Declined(f"its probe found rows at {found}, not at {expected}")
