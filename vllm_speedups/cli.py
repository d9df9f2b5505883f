"""The command line: vllm-speedups doctor | status | audit | diff | demo | bench."""

from __future__ import annotations

import argparse
import os
import sys

from . import __version__, audit, differences, doctor, status


def main(argv: list | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(prog="vllm-speedups", description="Check, try and measure vllm-speedups.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="which patches apply to the installed vLLM, and why others do not")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.set_defaults(run=doctor.run)

    status.add_command(commands)
    audit.add_command(commands)
    differences.add_command(commands)

    # Imported here, not above: those must work where NumPy or torch are broken or missing.
    from .bench import commands as benchmarks

    benchmarks.add_commands(commands)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except BrokenPipeError:
        # Whoever reads has had enough (`... | head`): that is no error, and Python would flush once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
