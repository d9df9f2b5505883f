"""Every patch against every release: the facts, taken from the registry's wheels, and docs/compatibility.md, made of them.

    python -m vllm_speedups.compatibility facts [--wheels FOLDER]     patches/releases*.json, from the registry
    python -m vllm_speedups.compatibility page                        docs/compatibility.md, from patches/releases*.json

Both are run in a checkout. The facts hold fingerprints and version numbers, none of vLLM's source.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.specifiers import SpecifierSet

from . import releases
from .audit import Verdict, judge
from .facts import FACTS, Facts, Incomplete, facts_of, refresh, runs
from .patching import APPLIED, DECLINED, NOT_MEANT, VLLM, Contract
from .plugin import discover
from .proofs import ENGINE as ENGINE_RUN
from .proofs import OWN_CODE, Proofs

PAGE = Path("docs", "compatibility.md")
OLDEST = "0.4.0"
# The release that the engine tests run, as the Makefile pins it.
ENGINE = "0.32.0"
NOT_THERE = "not there"


@dataclass(frozen=True)
class Cell:
    """What one patch does on one release, and how that is known."""

    verdict: Verdict
    proof: str = ""
    # The contract leaves the release out although its fingerprints match.
    fits: bool = False

    def text(self) -> str:
        return self.verdict.status + (f", {self.proof}" if self.proof else "")


def cell(contract: Contract, version: str, facts: Facts, proofs: Proofs | None = None) -> Cell:
    """One cell of the matrix. Raises Incomplete."""
    seen = {path: facts.fingerprint(path, version) for path in contract.paths()}
    if not any(seen[path] for form in contract.forms for path in form.targets):
        return Cell(Verdict(contract.name, NOT_THERE))
    verdict = judge(contract, version, seen.get, lambda name: facts.library(name, version))
    if verdict.status == NOT_MEANT:
        whole = judge(replace(contract, versions=SpecifierSet()), version, seen.get, lambda name: facts.library(name, version))
        return Cell(verdict, fits=whole.status == APPLIED)
    return Cell(verdict, _proof(contract, verdict, version, seen, proofs) if verdict.status == APPLIED else "")


def _proof(contract: Contract, verdict: Verdict, version: str, seen: dict, proofs: Proofs | None) -> str:
    proven = proofs.known.get(contract.name, {}) if proofs else {}
    # What waits to be asked for is not on in the engine of the tests.
    on_engine = version == ENGINE and not contract.off_by_default
    if version in proven:
        return ENGINE_RUN if on_engine else proofs.kind(contract.name, version)
    form = next(form for form in contract.forms if form.name == verdict.form)
    # Releases that the contract lists with all of the fingerprints that this release has.
    alike = set.intersection(*(set(known[seen[path]]) for path, known in form.paths().items()))
    tested = alike if contract.proof else alike & {ENGINE, *proven}
    if version in tested:
        return ENGINE_RUN if on_engine else OWN_CODE
    if tested:
        return f"same code as {max(tested, key=releases.Version)}"
    return "listed" if alike else "same parts"


def page(facts: Facts, contracts: list, others: tuple = (), proofs: Proofs | None = None) -> str:
    """The whole of docs/compatibility.md. Raises Incomplete.

    `facts` and `contracts` are those about vLLM, `others` holds pairs of the same about other packages.
    """
    for known, of in ((facts, contracts), *others):
        known.check(of)
    newest_first = list(reversed(facts.releases))
    cells = {
        (contract.name, version): cell(contract, version, facts, proofs)
        for contract in contracts
        for version in newest_first
    }
    everything = [*contracts, *(contract for _, of in others for contract in of)]
    listed = list(dict.fromkeys(contract.proof for contract in everything if contract.proof))
    if proofs and proofs.known:
        listed.append(
            "the patch's tests beside stock were run on this release's own Python code, over the compiled CPU libraries of "
            f"{ENGINE}, with the grammar libraries that it asks for (`make prove-releases`)"
        )
    lines = [
        "# Which patch applies to which vLLM",
        "",
        *_filled(
            f"Made by `make compatibility` from `{FACTS.as_posix()}`, which `make facts` takes from the registry's wheels: "
            f"every stable release from {facts.releases[0]} to {facts.releases[-1]}, {len(facts.releases)} of them. Their "
            "source was read, not run. For another vLLM, or a build of your own, ask `vllm-speedups audit`."
        ),
        "",
        *_filled(
            "- **applied**: every definition that the patch replaces or relies on is one that its contract knows. It is "
            "proven once more on its first use. What stands behind it is"
        ),
        *_filled(
            f"  - *engine*: the tests ran this release's real engine on a CPU, stock and patched ({ENGINE} whenever they run, "
            "others by `make prove-releases ENGINE=1`);"
        ),
        *_filled(f"  - *own code*: {'; '.join(listed)};" if listed else ""),
        *_filled("  - *same code*: not run on this release; its fingerprints are all those of one that was tested;"),
        *_filled("  - *listed*: the contract lists such a release and does not say how it was tested;"),
        *_filled(
            "  - *same parts*: not run on this release; the contract lists each fingerprint, but no one release with all "
            "of them."
        ),
        "- **declined**: something differs. The patch stays off there and vLLM runs stock.",
        "- **not meant**: the contract leaves this release out. The patch stays off there and vLLM runs stock.",
        "- **not there**: nothing that the patch replaces exists in this release.",
        "",
        *_without_wheel(facts),
        *_overview(contracts, cells, facts),
        "",
        "## Release by release",
        "",
        f"| vLLM | {' | '.join(contract.name for contract in contracts)} |",
        f"| --- |{' --- |' * len(contracts)}",
    ]
    for version in newest_first:
        lines.append(f"| {version} | {' | '.join(cells[contract.name, version].text() for contract in contracts)} |")
    for known, of in others:
        lines += _beside(known, of)
    why = [line for contract in contracts for line in _reasons(contract, cells, facts)]
    if why:
        lines += ["", "## Why not", "", "What differs from the form of the contract that comes closest:", "", *why]
    return "\n".join(lines) + "\n"


def _beside(facts: Facts, contracts: list) -> list:
    """A section about another package's releases."""
    lines = [
        "",
        f"## Releases of {facts.package}",
        "",
        *_filled(f"From `{facts_of(facts.package).as_posix()}`. These patches do not depend on the version of vLLM."),
        "",
        f"| {facts.package} | {' | '.join(contract.name for contract in contracts)} |",
        f"| --- |{' --- |' * len(contracts)}",
    ]
    for version in reversed(facts.releases):
        lines.append(f"| {version} | {' | '.join(cell(contract, version, facts).text() for contract in contracts)} |")
    return lines


def _filled(text: str) -> list:
    """A paragraph or a list item as lines."""
    indent = " " * (len(text) - len(text.lstrip(" -")))
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _without_wheel(facts: Facts) -> list:
    if not facts.without_wheel:
        return []
    listed = ", ".join(f"{version} ({why})" for version, why in facts.without_wheel.items())
    return [*_filled(f"Left out: {listed}."), ""]


def _overview(contracts: list, cells: dict, facts: Facts) -> list:
    """A table of how many and which releases each patch applies to."""
    lines = ["| patch | applied | declined | not meant | not there |", "| --- | --- | --- | --- | --- |"]
    for contract in contracts:
        row = [f"`{contract.name}`" + (", off by default" if contract.off_by_default else "")]
        for status in (APPLIED, DECLINED, NOT_MEANT, NOT_THERE):
            of = [version for version in facts.releases if cells[contract.name, version].verdict.status == status]
            row.append(f"{len(of)}: {_shown(of, facts)}" if of else "0")
        lines.append(f"| {' | '.join(row)} |")
    for contract in contracts:
        lines += _libraries(contract, cells, facts)
        fits = [version for version in facts.releases if cells[contract.name, version].fits]
        if fits:
            lines += [
                "",
                *_filled(f"`{contract.name}` would fit {_shown(fits, facts)} too, which its contract leaves out."),
            ]
    return lines


def _libraries(contract: Contract, cells: dict, facts: Facts) -> list:
    """What a contract asks of libraries, and which releases leave it open whether they have that."""
    lines = []
    for name, proven in contract.libraries.items():
        of = [version for version in facts.releases if cells[contract.name, version].verdict.status == APPLIED]
        open_ = [version for version in of if not re.fullmatch("==[^,*]+", facts.library(name, version) or "")]
        text = f"`{contract.name}` was proven with {name} {', '.join(proven)}, and declines with any other."
        if open_:
            text += f" {_shown(open_, facts)} let others in too."
        lines += ["", *_filled(text)]
    return lines


def _shown(versions: list, facts: Facts) -> str:
    return runs(versions, facts.releases, last=" to ").replace(" to ", "\0").replace(" ", ", ").replace("\0", " to ")


def _reasons(contract: Contract, cells: dict, facts: Facts) -> list:
    grouped: dict = {}
    for version in reversed(facts.releases):
        verdict = cells[contract.name, version].verdict
        if verdict.status == DECLINED:
            grouped.setdefault(verdict.differences, []).append(version)
    lines = []
    for differences, versions in grouped.items():
        lines.append(f"- `{contract.name}` on {_shown(versions[::-1], facts)}")
        lines += [f"  - {difference.kind} `{difference.path}` {difference.what}" for difference in differences]
    return lines


def main(argv: list | None = None) -> int:
    """Run one of the two commands. 0: done; 1: the page cannot be made of these facts; 2: the registry cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m vllm_speedups.compatibility", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("facts", help=f"refresh {FACTS} from the registry")
    command.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels that lie there are not fetched")
    commands.add_parser("page", help=f"write {PAGE} from {FACTS}")
    options = parser.parse_args(argv)
    known = [(stored(package), contracts) for package, contracts in by_package(discover()).items()]
    try:
        if options.command == "facts":
            for facts, contracts in known:
                _refresh(facts, contracts, options.wheels)
        else:
            (facts, contracts), *others = known
            write(PAGE, page(facts, contracts, tuple(others), Proofs.load(facts.releases)))
    except Incomplete as error:
        print(error, file=sys.stderr)
        return 1
    except releases.Unreadable as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def by_package(patches: list) -> dict:
    """The contracts of patches by the package that they are about, vLLM first."""
    found: dict = {VLLM: []}
    for patch in patches:
        found.setdefault(patch.contract.package, []).append(patch.contract)
    return found


def stored(package: str, root: Path = Path()) -> Facts:
    """The facts about a package in a checkout, none where there are none yet."""
    file = root / facts_of(package)
    return Facts.load(file.read_text(encoding="utf-8"), package) if file.exists() else Facts(package=package)


def _refresh(facts: Facts, contracts: list, folder: Path | None) -> None:
    """Bring facts up to date with the registry: of vLLM all releases, of others those that a contract is meant for."""
    package = facts.package
    oldest = OLDEST if package == VLLM else "0"
    listed = releases.published(package, oldest)
    if package != VLLM:
        listed = [version for version in listed if any(contract.meant_for(version) for contract in contracts)]
    wheels = releases.wheels_in(folder, package) if folder else {}
    refresh(facts, contracts, listed, wheels, lambda: write(facts_of(package), facts.dump()), _say)


def _say(text: str) -> None:
    print(text, flush=True)


def write(file: Path, text: str) -> None:
    """Replace a file as a whole, so that an interruption leaves the old one."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
        new.write(text)
    os.chmod(new.name, 0o644)
    os.replace(new.name, file)


if __name__ == "__main__":
    sys.exit(main())
