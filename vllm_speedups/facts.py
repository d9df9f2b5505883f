"""Facts about releases: which definitions of the contracts each has, as fingerprints, kept in `patches/releases.json`.

Fingerprints and version numbers only, none of vLLM's source.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from . import releases
from .patching import VLLM

FACTS = Path("patches", "releases.json")
# Stands for the fingerprint of a definition that a release lacks.
MISSING = "missing"


class Incomplete(Exception):
    """The facts lack something. The text says what, and which make target to run."""


@dataclass
class Facts:
    """Fingerprints of every path in every release: path -> release -> fingerprint, MISSING or UNPARSED.

    `without_wheel` holds the releases that could not be fetched, with the reason, and `package` is what they are of.
    `libraries` holds what releases require of the libraries that contracts name: library -> release -> specifier, empty
    where it requires none.
    """

    releases: list = field(default_factory=list)
    without_wheel: dict = field(default_factory=dict)
    seen: dict = field(default_factory=dict)
    package: str = VLLM
    libraries: dict = field(default_factory=dict)

    def lacks(self, contracts: Iterable, version: str) -> list:
        """The paths and libraries of contracts of which nothing is known in a release."""
        lacking = [path for path in _paths(contracts) if version not in self.seen.get(path, {})]
        lacking += [name for name in _libraries(contracts) if version not in self.libraries.get(name, {})]
        return sorted(lacking)

    def library(self, name: str, version: str) -> str | None:
        """What a release requires of a library, as a specifier, or None. Raises Incomplete."""
        try:
            return self.libraries[name][version] or None
        except KeyError:
            raise Incomplete(
                f"{facts_of(self.package)} says nothing of {name} in {version}: run `make facts compatibility`"
            ) from None

    def fingerprint(self, path: str, version: str) -> str | None:
        """As Source.fingerprint. Raises Incomplete."""
        try:
            found = self.seen[path][version]
        except KeyError:
            raise Incomplete(
                f"{facts_of(self.package)} says nothing of {path} in {version}: run `make facts compatibility`"
            ) from None
        return None if found == MISSING else found

    def check(self, contracts: list) -> None:
        """Raises Incomplete where a path of a contract is not known of a release."""
        for version in self.releases:
            lacking = self.lacks(contracts, version)
            if lacking:
                more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
                raise Incomplete(
                    f"{facts_of(self.package)} says nothing of {lacking[0]}{more} in {version}: "
                    "run `make facts compatibility`"
                )

    def dump(self) -> str:
        """As JSON: for every fingerprint the releases that have it, as runs of neighbours in the list of releases."""
        table = {
            "releases": " ".join(self.releases),
            "without_wheel": self.without_wheel,
            "libraries": self._rolled(self.libraries),
            "paths": self._rolled(self.seen),
        }
        return json.dumps(table, indent=1) + "\n"

    def _rolled(self, known: Mapping) -> dict:
        position = {version: number for number, version in enumerate(self.releases)}
        rolled = {}
        for name in sorted(known):
            grouped: dict = {}
            for version in sorted(known[name], key=position.__getitem__):
                grouped.setdefault(known[name][version], []).append(version)
            rolled[name] = {value: runs(versions, self.releases) for value, versions in grouped.items()}
        return rolled

    @classmethod
    def load(cls, text: str, package: str = VLLM) -> Facts:
        """The facts that `dump` wrote."""
        table = json.loads(text)
        facts = cls(table["releases"].split(), table["without_wheel"], package=package)
        for kind, known in (("paths", facts.seen), ("libraries", facts.libraries)):
            for name, values in table.get(kind, {}).items():
                known[name] = {
                    version: value for value, text in values.items() for version in unrolled(text, facts.releases)
                }
        return facts


def facts_of(package: str) -> Path:
    """The file with the facts about a package's releases."""
    return FACTS if package == VLLM else FACTS.with_name(f"releases-{package}.json")


def _paths(contracts: Iterable) -> set:
    return {path for contract in contracts for path in contract.paths()}


def _libraries(contracts: Iterable) -> set:
    return {name for contract in contracts for name in contract.libraries}


def runs(versions: list, order: list, last: str = "..") -> str:
    """Versions as runs of neighbours in `order`: "0.4.0..0.4.2 0.5.0"."""
    found: list = []
    for version in versions:
        if found and order.index(version) == order.index(found[-1][-1]) + 1:
            found[-1].append(version)
        else:
            found.append([version])
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}{last}{run[-1]}" for run in found)


def unrolled(text: str, order: list) -> list:
    """The versions that `runs` wrote."""
    found = []
    for run in text.split():
        first, _, last = run.partition("..")
        found += order[order.index(first) : order.index(last or first) + 1]
    return found


def refresh(facts: Facts, contracts: list, listed: list, wheels: Mapping, save: Callable, say: Callable) -> None:
    """Bring the facts up to date with the contracts and with the releases that the registry lists.

    A release of which every path is known already is not read again. `wheels` holds files by version that need not be
    fetched. `save()` is called after each release, so that what was read survives an interruption.
    """
    paths, libraries = _paths(contracts), _libraries(contracts)
    facts.seen = {path: facts.seen.get(path, {}) for path in sorted(paths)}
    facts.libraries = {name: facts.libraries.get(name, {}) for name in sorted(libraries)}
    facts.releases = sorted({*facts.releases, *listed}, key=releases.Version)
    wanted = [version for version in reversed(facts.releases) if facts.lacks(contracts, version)]
    for number, version in enumerate(wanted, 1):
        started = time.monotonic()
        try:
            with _release(version, wheels, facts.package) as release:
                for path in sorted(paths):
                    facts.seen[path][version] = release.fingerprint(path) or MISSING
                for name in sorted(libraries):
                    facts.libraries[name][version] = release.library(name) or ""
            facts.without_wheel.pop(version, None)
            said = "read"
        except releases.Unreadable as error:
            said = str(error)
            if not isinstance(error, releases.NoWheel):
                raise
            facts.without_wheel[version] = "no wheel for Linux on x86-64"
            facts.releases.remove(version)
        save()
        say(f"{number} of {len(wanted)}: {version} {said} ({time.monotonic() - started:.0f} s)")
    save()


def _release(version: str, wheels: Mapping, package: str):
    names = () if package == VLLM else (package, package)
    return releases.opened(str(wheels.get(version, version)), *names)
