"""The commands of the benchmarks: `demo` and `bench NAME`."""

from __future__ import annotations

from . import demo, mask, prefix, rows


def add_commands(commands) -> None:
    """Add them to the subparsers of the command line. Each module has `add_arguments(parser)` and `run(options)`."""
    _add(commands, "demo", demo, "guided decoding on real vLLM, stock and patched side by side, ids compared")
    parser = commands.add_parser("bench", help="measure one step alone, stock and patched side by side")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    _add(benchmarks, "mask", mask, "applying a step's masks to the logits")
    _add(benchmarks, "rows", rows, "filling a grammar's rows")
    _add(benchmarks, "prefix", prefix, "hashing a prompt's blocks, and the rest of admission")


def _add(commands, name: str, module, text: str) -> None:
    parser = commands.add_parser(name, help=text, description=text)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
