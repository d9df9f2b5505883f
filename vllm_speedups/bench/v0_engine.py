"""`vllm-speedups bench v0-engine`: vLLM 0.8.5's V0 engine with the outlines backend, guided and not, stock and patched."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from . import engine, models
from . import report as reports
from .schemas import SCHEMAS

# Ends about where the text may: outputs of one length compare with unguided ones.
LONG = json.dumps({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
SCHEMES = {"text": LONG, **SCHEMAS}


def add_arguments(parser) -> None:
    """The arguments of `vllm-speedups bench v0-engine`."""
    parser.add_argument("--batch", type=int, default=16, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a request, at most (default: %(default)s)")
    parser.add_argument(
        "--schemas", default="text,bounded", help="of " + ", ".join(SCHEMES) + " (default: %(default)s)"
    )
    parser.add_argument("--model", help="folder of a model, loaded with dummy weights (default: a two-layer one)")
    parser.add_argument("--repeat", type=int, default=3, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--no-disk-cache", action="store_true", help="vLLM's default: stock compiles for every request")
    parser.add_argument("--stock-requests", type=int, help="guided requests asked of stock (default: the batch)")
    reports.add_arguments(parser)


def run(options) -> int:
    """Measure and print. 0: all token ids equal; 1: some differ; 2: this vLLM cannot be asked."""
    from ..doctor import find_vllm

    version = (find_vllm() or {}).get("version") or "none"
    if not version.startswith("0.8."):
        print(f"bench v0-engine: needs vLLM 0.8.5 with its V0 engine, not {version}: make v0-engine", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="vllm-speedups-") as folder:
        rows = measure(options, Path(folder))
    reports.finish(options, reports.make("v0_engine", options, rows=rows), table)
    return 0 if all(row["equal"] for row in rows) else 1


def measure(options, folder: Path) -> list:
    """A row for every schema: medians of tokens per second, ratios within a round, and whether all ids are equal."""
    arguments = engine.engine_arguments(options.model or str(models.build_model(folder / "model")))
    if options.model:
        del arguments["tokenizer_mode"], arguments["config_format"]
    arguments |= {"guided_decoding_backend": "outlines", "max_num_seqs": options.batch}
    prompts = [[1, 2, 3, 5 + index] for index in range(options.batch)]
    few = options.stock_requests or options.batch
    rows = []
    with _engine(arguments, False, options, folder) as stock, _engine(arguments, True, options, folder) as patched:
        for one in (stock, patched):
            one.generate(prompts, 8)
        for name in options.schemas.split(","):
            guide = {"json": SCHEMES[name]}
            # Stock fills the disk cache first: it is on for both.
            first = stock.generate(prompts[:few], options.tokens, guide=guide)
            cold = patched.generate(prompts, options.tokens, guide=guide)
            row = {"schema": name, "cold": _speed(cold), "equal": first["ids"] == cold["ids"][:few], "rounds": []}
            for _ in range(options.repeat):
                free = patched.generate(prompts, options.tokens)
                guided = patched.generate(prompts, options.tokens, guide=guide)
                plain = stock.generate(prompts[:few], options.tokens, guide=guide)
                row["equal"] &= guided["ids"] == cold["ids"] and plain["ids"] == first["ids"]
                row["rounds"].append([_speed(free), _speed(plain), _speed(guided)])
            row["tokens"] = cold["tokens"]
            row["unguided"], row["stock"], row["warm"] = (median(speeds) for speeds in zip(*row["rounds"]))
            row["share"] = median(guided / free for free, _, guided in row["rounds"])
            row["ratio"] = median(guided / plain for _, plain, guided in row["rounds"])
            rows.append(row)
    return rows


def _engine(arguments: dict, patched: bool, options, folder: Path) -> engine.Engine:
    cache = {"OUTLINES_CACHE_DIR": str(folder / "outlines"), "VLLM_V0_USE_OUTLINES_CACHE": "1"}
    return engine.Engine(arguments, patched, {"VLLM_USE_V1": "0", **({} if options.no_disk_cache else cache)})


def _speed(answer: dict) -> float:
    return answer["tokens"] / answer["seconds"]


def table(report: dict) -> str:
    """The report for people."""
    chosen = report["options"]
    cache = "off, as vLLM has it" if chosen["no_disk_cache"] else "on"
    asked = f"batch {chosen['batch']}, {chosen['tokens']} tokens; disk cache {cache}"
    lines = [
        f"{reports.heading(report)}; V0 engine, outlines, {asked}; tokens/s",
        "",
        "schema      unguided  stock   cold   warm  warm/stock  warm/unguided  token ids",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['schema']:10} {row['unguided']:9.0f} {row['stock']:6.1f} {row['cold']:6.0f} {row['warm']:6.0f}"
            f"  {row['ratio']:10.1f}  {row['share']:13.2f}  {'equal' if row['equal'] else 'DIFFER'} ({row['tokens']:,})"
        )
    return "\n".join(lines)
