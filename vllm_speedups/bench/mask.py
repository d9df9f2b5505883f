"""`vllm-speedups bench mask`: applying packed rows to logits, stock's way and ours, over densities and dtypes.

Needs torch and NumPy, and compares with stock's kernel where vLLM or xgrammar is installed. From a checkout, with nothing of
it installed: `python -m vllm_speedups.bench.mask`. With `--device cuda`: see `mask_cuda.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from types import SimpleNamespace

from . import report as reports

VOCAB_SIZE = 151_936
VLLMS = "vLLM's function"
DTYPES = ("float32", "bfloat16", "float16")
# Tokens allowed, as they are or counted from the vocabulary's end.
ALLOWED = (1, 100, 1_000, 5_000, 20_000, 40_000, 75_000, 110_000, 130_000, 140_000, -7_000, -2_000, -36, -0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `vllm-speedups bench mask`."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="rows of logits (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE, help="logits a row (default: %(default)s)")
    parser.add_argument(
        "--dtypes", type=reports.numbers(str), default=list(DTYPES[:2]), help=",".join(DTYPES) + " (float32,bfloat16)"
    )
    parser.add_argument(
        "--distinct",
        type=reports.numbers(int),
        default=[1, 0],
        help="different masks in the batch, comma-separated; 0: one a row (1,0)",
    )
    parser.add_argument(
        "--repeat", type=int, default=9, help="interleaved pairs; medians are shown (default: %(default)s)"
    )
    reports.add_arguments(parser)


def main(argv: list | None = None) -> int:
    """The benchmark alone, without what the other commands import."""
    parser = argparse.ArgumentParser(prog="python -m vllm_speedups.bench.mask", description=__doc__)
    add_arguments(parser)
    options = parser.parse_args(argv)
    obstacle = reports.obstacle(options)
    if obstacle:
        print(f"bench mask: {obstacle}", file=sys.stderr)
        return 2
    return run(options)


def run(options) -> int:
    """Measure and print. 0: all logits equal stock's; 1: some differ; 2: torch or the device is missing."""
    wrong = sorted(set(options.dtypes) - set(DTYPES))
    if wrong or options.device not in ("cpu", "cuda") or min(options.rows, options.vocab, options.repeat) < 1:
        print(
            f"bench mask: --device is cpu or cuda, --dtypes are of {', '.join(DTYPES)}, and --rows, --vocab and --repeat "
            "are 1 or more",
            file=sys.stderr,
        )
        return 2
    if options.device == "cuda":
        from . import mask_cuda

        return mask_cuda.run(options)
    try:
        stock, name = installed()
    except ImportError as error:
        print(f"bench mask needs torch and NumPy: {error}", file=sys.stderr)
        return 2
    results = []
    for dtype in options.dtypes:
        for distinct in options.distinct:
            for allowed in densities(options.vocab):
                results.append(_measure(stock, options, dtype, distinct or options.rows, allowed))
                reports.say(_line(results[-1]))
    reports.finish(options, reports.make("mask", options, stock=name, rows=results), table)
    return 0 if all(result["equal"] for result in results) else 1


def densities(vocab_size: int) -> list:
    """How many tokens the masks allow, one after another."""
    counts = [allowed if allowed > 0 else vocab_size + allowed for allowed in ALLOWED]
    return sorted({count for count in counts if 0 < count <= vocab_size})


def batch_of(options, distinct: int, allowed: int):
    """Packed rows int32 [rows, words], each with `allowed` random tokens, `distinct` different ones in turn."""
    import numpy as np

    from ..masks.packed import pack

    random = np.random.default_rng(0)
    masks = [pack(random.permutation(options.vocab) < allowed) for _ in range(distinct)]
    return np.stack([masks[index % distinct] for index in range(options.rows)])


def installed():
    """What applies rows (int32 array [n, words]) to logits [n, vocab]: stock vLLM's function, else xgrammar's kernel, else
    torch's `masked_fill_`; and which of them it is."""
    import torch

    try:
        from vllm.v1.structured_output.utils import apply_grammar_bitmask
    except ImportError:
        pass
    else:
        return _vllms(apply_grammar_bitmask), VLLMS
    try:
        import xgrammar
    except ImportError:
        return _filled, "torch's masked_fill_, since neither vLLM nor xgrammar can be imported"
    apply = xgrammar.apply_token_bitmask_inplace
    return lambda logits, rows: apply(logits, torch.from_numpy(rows)), "xgrammar's kernel"


def _filled(logits, rows) -> None:
    import torch

    from ..masks.packed import unpack

    for values, row in zip(logits, rows):
        values.masked_fill_(torch.from_numpy(unpack(row, len(values)) == 0), float("-inf"))


def _vllms(apply_grammar_bitmask):
    # The function itself, should the plugin be loaded here.
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
    import torch

    from ..masks.apply import MaskApplier

    rows = batch_of(options, distinct, allowed)
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
    equal = all(torch.equal(bits(one), bits(pairs[0][0][1])) for one in (ours[0][1], pairs[-1][1][1]))
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


def bits(logits):
    """The logits' bits, so that every NaN equals itself."""
    import torch

    return logits.view(torch.int32 if logits.dtype == torch.float32 else torch.int16)


def _line(result: dict) -> str:
    return (
        f"{result['dtype']:9} {result['distinct']:3} masks, {result['allowed']:7,} allowed: stock {result['stock_ms']:7.2f} ms"
        f", first {result['first_ms']:7.2f}, warm {result['warm_ms']:6.2f}, ratio {result['ratio']:6.2f}"
        f"{'' if result['equal'] else '  DIFFERS'}"
    )


def table(report: dict) -> str:
    """The report as text: a table for every dtype, milliseconds."""
    if report["options"]["device"] == "cuda":
        from . import mask_cuda

        return mask_cuda.table(report)
    options, lines = report["options"], [reports.heading(report)]
    lines.append(
        f"{options['rows']} rows of {options['vocab']:,} logits, ms, medians of {options['repeat']}; "
        f"stock is {report['stock']}; first: masks never seen"
    )
    found = {(row["dtype"], row["distinct"], row["allowed"]): row for row in report["rows"]}
    groups = list(dict.fromkeys(row["distinct"] for row in report["rows"]))
    for dtype in dict.fromkeys(row["dtype"] for row in report["rows"]):
        names = [f"{count} masks" if count > 1 else "all alike" for count in groups]
        lines += ["", f"{dtype:>10} " + "".join(f"{name:>32}" for name in names)]
        lines.append(f"{'allowed':>10} " + f"{'stock':>11}{'first':>7}{'warm':>7}{'ratio':>7}" * len(groups))
        for allowed in dict.fromkeys(row["allowed"] for row in report["rows"]):
            cells = [found[dtype, count, allowed] for count in groups]
            lines.append(f"{allowed:10,} " + "".join(map(_cell, cells)))
    return "\n".join(lines)


def _cell(row: dict) -> str:
    differs = "" if row["equal"] else " DIFFERS"
    return f"{row['stock_ms']:11.1f}{row['first_ms']:7.1f}{row['warm_ms']:7.1f}{row['ratio']:7.1f}{differs}"


if __name__ == "__main__":
    sys.exit(main())
