"""`vllm-speedups status`: what the patches did so far in running vLLM processes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import reporter

FOUND, NOTHING = 0, 1
# Counters of every patch that have a column of their own.
_COLUMNS = ("hits", "misses", "evictions")
_OF_THE_PATCH = ("verified", "differences", "failures")


def add_command(commands) -> None:
    """Add `status` to the subparsers of the command line."""
    command = commands.add_parser("status", help="what the patches did in running vLLM processes of this user")
    command.add_argument("pid", nargs="?", type=int, help="a server: only this process and those that it started")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what every process says. 0 where one answered, 1 where none did."""
    states = [state for state in map(reporter.ask, reporter.pids(options.pid)) if state]
    if options.json:
        print(json.dumps(states, indent=1))
    elif states:
        print("\n\n".join(map(text, states)))
    if not states:
        whose = f"process {options.pid} or its children" if options.pid else "processes of this user"
        print(
            f"status: no running vLLM among {whose} with vllm-speedups loaded (asked in {reporter.folder()}; "
            "VLLM_SPEEDUPS_STATUS=0 keeps a process silent, and a container has a folder of its own)",
            file=sys.stderr,
        )
    return FOUND if states else NOTHING


def text(state: dict) -> str:
    """The state of one process for people: a line a patch, other counters under it."""
    lines = [f"{_title(state)}: pid {state['pid']} of {state['parent']}, vLLM {state['vllm']}"]
    names = (*_COLUMNS, *_OF_THE_PATCH)
    lines.append(f"  {'patch':18} {'status':10} {'MiB':>7} " + " ".join(f"{name:>12}" for name in names))
    for patch in state["patches"]:
        counts = dict(patch["counters"])
        held = counts.pop("bytes", None)
        cells = [counts.pop(name, 0) for name in _COLUMNS] + [patch[name] for name in _OF_THE_PATCH]
        size = "" if held is None else f"{held / 2**20:.1f}"
        row = f"  {patch['name']:18} {patch['status']:10} {size:>7} " + " ".join(f"{cell:>12,}" for cell in cells)
        lines.append(row.rstrip())
        rest = ", ".join(f"{name} {value:,}" for name, value in counts.items() if value)
        lines += [f"    {note}" for note in (patch["reason"], rest) if note]
    return "\n".join(lines)


def line(state: dict) -> str:
    """The state of one process as a line for the log; empty where no patch did anything."""
    parts = []
    for patch in state["patches"]:
        shown = {**patch["counters"], **{name: patch[name] for name in _OF_THE_PATCH}}
        held = shown.pop("bytes", 0)
        numbers = [f"{shown[name]:,} {name}" for name in (*_COLUMNS, *_OF_THE_PATCH) if shown.get(name)]
        if numbers:
            parts.append(f"{patch['name']} {', '.join([*numbers, f'{held / 2**20:.1f} MiB'])}")
    return f"vllm-speedups: {'; '.join(parts)}" if parts else ""


def _title(state: dict) -> str:
    """What a process calls itself: vLLM gives its processes titles."""
    try:
        words = Path(f"/proc/{state['pid']}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "process"
    return " ".join(words).strip()[:60] or "process"
