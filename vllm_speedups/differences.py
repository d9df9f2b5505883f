"""`vllm-speedups diff`: how the code that contracts name differs between two vLLMs, for those who maintain patches."""

from __future__ import annotations

import contextlib
import difflib
import sys

from . import audit, releases
from .patching import UNPARSED
from .plugin import discover

SAME, DIFFERS, UNREADABLE = 0, 1, 2


def add_command(commands) -> None:
    """Add `diff` to the command line."""
    command = commands.add_parser(
        "diff",
        help="how the code that patches replace or rely on differs between two vLLMs",
        description="A unified diff of every target and premise whose fingerprint differs. Exit status: 0 if none does, "
        "1 if one does, 2 if OLD or NEW cannot be read.",
    )
    command.add_argument("old", metavar="OLD", help="a wheel, a folder, an environment or a version, as for audit")
    command.add_argument("new", metavar="NEW", help="the same")
    command.add_argument("--patch", action="append", metavar="NAME", help="only this patch's contract (repeatable)")
    audit.add_distribution(command)
    command.set_defaults(run=run)


def run(options) -> int:
    """Print the differences and return the exit status."""
    contracts = {patch.name: patch.contract for patch in discover()}
    unknown = [name for name in options.patch or () if name not in contracts]
    if unknown:
        print(f"--patch: no patch is called {', '.join(unknown)} (known: {', '.join(contracts)})", file=sys.stderr)
        return UNREADABLE
    chosen = [contracts[name] for name in sorted(set(options.patch or contracts))]
    # A path may be in the contracts of several patches.
    patches: dict = {}
    for contract in chosen:
        for path in sorted(contract.paths()):
            patches.setdefault(path, []).append(contract.name)
    try:
        with contextlib.ExitStack() as stack:
            old, new = (
                stack.enter_context(releases.opened(target, options.distribution))
                for target in (options.old, options.new)
            )
            found = [(path, lines) for path in patches if (lines := difference(path, old, new))]
    except releases.Unreadable as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    for path, lines in found:
        print(f"{path} ({', '.join(patches[path])})", *lines, "", sep="\n")
    print(f"{len(found)} of {len(patches)} definitions differ between {old.label} and {new.label}")
    return DIFFERS if found else SAME


def difference(path: str, old: releases.Release, new: releases.Release) -> list:
    """The lines that tell how a definition differs between two releases, none where it does not."""
    before, after = old.fingerprint(path), new.fingerprint(path)
    if before == after != UNPARSED:
        return []
    for fingerprint, release, other in ((before, old, new), (after, new, old)):
        if fingerprint is None:
            return [f"  missing in {release.label}, there in {other.label}"]
        if fingerprint == UNPARSED:
            return [f"  cannot be parsed by this Python in {release.label}"]
    module = path.partition(":")[0]
    heads = (f"{old.label} {module}", f"{new.label} {module}")
    return list(difflib.unified_diff(old.lines(path), new.lines(path), *heads, lineterm=""))
