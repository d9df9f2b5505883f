"""`vllm-speedups bench mask`: applying packed rows to logits, stock's way and ours, over densities and dtypes."""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from types import SimpleNamespace

VOCAB_SIZE = 151_936
# Tokens allowed, as they are or counted from the vocabulary's end.
ALLOWED = (1, 100, 1_000, 5_000, 20_000, 40_000, 75_000, 110_000, 130_000, 140_000, -7_000, -2_000, -36, -0)


def add_arguments(parser) -> None:
    """The arguments of `vllm-speedups bench mask`."""
    parser.add_argument("--rows", type=int, default=64, help="rows of logits (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, help="logits a row (default: %(default)s)")
    parser.add_argument(
        "--dtypes", default="float32,bfloat16", help="float32, bfloat16, float16 (default: %(default)s)"
    )
    parser.add_argument(
        "--distinct", default="1,0", help="different masks in the batch; 0: one a row (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=int, default=9, help="interleaved pairs; medians are shown (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options) -> int:
    """Measure and print. 0: all logits equal stock's; 1: some differ; 2: torch or stock's kernel is missing."""
    try:
        import torch  # noqa: F401

        stock = _stock()
    except ImportError as error:
        print(f"bench mask needs torch, and vLLM or xgrammar: {error}", file=sys.stderr)
        return 2
    results = []
    for dtype in options.dtypes.split(","):
        for distinct in map(int, options.distinct.split(",")):
            for allowed in ALLOWED:
                count = allowed if allowed > 0 else options.vocab + allowed
                if not 0 < count <= options.vocab:
                    continue
                results.append(_measure(stock, options, dtype, distinct or options.rows, count))
                if not options.json:
                    print(_line(results[-1]), flush=True)
    if options.json:
        print(json.dumps(results, indent=1))
    return 0 if all(result["equal"] for result in results) else 1


def _stock():
    """What applies rows (int32 array [n, words]) to logits [n, vocab] in stock vLLM, or xgrammar's kernel without vLLM."""
    try:
        from vllm.v1.structured_output.utils import apply_grammar_bitmask
    except ImportError:
        import torch
        import xgrammar

        return lambda logits, rows: xgrammar.apply_token_bitmask_inplace(logits, torch.from_numpy(rows))
    apply_grammar_bitmask = getattr(apply_grammar_bitmask, "__wrapped__", apply_grammar_bitmask)

    def stock(logits, rows):
        names = [str(index) for index in range(len(rows))]
        apply_grammar_bitmask(
            SimpleNamespace(scheduled_spec_decode_tokens={}),
            SimpleNamespace(grammar_bitmask=rows, structured_output_request_ids=names),
            SimpleNamespace(req_ids=names),
            logits,
        )

    return stock


def _measure(stock, options, dtype: str, distinct: int, allowed: int) -> dict:
    import numpy as np
    import torch

    from ..masks.apply import MaskApplier
    from ..masks.packed import pack

    random = np.random.default_rng(0)
    masks = [pack(random.permutation(options.vocab) < allowed) for _ in range(distinct)]
    rows = np.stack([masks[index % distinct] for index in range(options.rows)])
    logits = torch.randn(options.rows, options.vocab).to(getattr(torch, dtype))
    applier, indices = MaskApplier(2**30), list(range(options.rows))

    def timed(function) -> tuple:
        # A fresh copy, as a step's logits are; a thread pool that sleeps in between, as in a step.
        batch = logits.clone()
        start = time.perf_counter()
        function(batch)
        return time.perf_counter() - start, batch

    ours = [timed(lambda batch: applier.apply(batch, rows, indices)) for _ in range(3)]
    pairs = [
        (timed(lambda batch: stock(batch, rows)), timed(lambda batch: applier.apply(batch, rows, indices)))
        for _ in range(options.repeat)
    ]
    equal = all(torch.equal(_bits(one), _bits(pairs[0][0][1])) for one in (ours[0][1], pairs[-1][1][1]))
    return {
        "dtype": dtype,
        "allowed": allowed,
        "distinct": distinct,
        "stock_ms": 1e3 * median(pair[0][0] for pair in pairs),
        "first_ms": 1e3 * ours[0][0],
        "warm_ms": 1e3 * median(pair[1][0] for pair in pairs),
        "ratio": median(pair[0][0] / pair[1][0] for pair in pairs),
        "equal": equal,
    }


def _bits(logits):
    import torch

    return logits.view(torch.int32 if logits.dtype == torch.float32 else torch.int16)


def _line(result: dict) -> str:
    return (
        f"{result['dtype']:9} {result['distinct']:3} masks, {result['allowed']:7,} allowed: stock {result['stock_ms']:7.2f} ms"
        f", first {result['first_ms']:7.2f}, warm {result['warm_ms']:6.2f}, ratio {result['ratio']:6.2f}"
        f"{'' if result['equal'] else '  DIFFERS'}"
    )
