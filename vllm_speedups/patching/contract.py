"""Contracts: what a patch replaces, what it relies on, and the code that it was proven against."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What a maintainer needs a year later, demanded of every patch.
PROSE = ("summary", "what", "why", "how", "delete_when")


# The package that a patch changes unless its contract names another.
VLLM = "vllm"
# Stands for the version of a package that does not say which it is: later than any.
_TODAYS = "9999"
# Stands for the fingerprint of a definition whose module this Python cannot parse.
UNPARSED = "unparsed"


class Declined(Exception):
    """The one way in which a patch says no. Its text is a reason that a person can act on.

    `differences` holds what differs from the form of the contract that comes closest, where that is the reason.
    """

    def __init__(self, reason: str, differences: Sequence = ()):
        super().__init__(reason)
        self.differences = tuple(differences)


class Difference(NamedTuple):
    """One definition that is not as a form of a contract has it: `what` is "changed", "missing" or UNPARSED."""

    path: str
    kind: str
    what: str

    def __str__(self) -> str:
        if self.what == UNPARSED:
            return f"{self.path} cannot be parsed by this Python ({sys.version_info[0]}.{sys.version_info[1]})"
        return f"{self.path} {'is missing' if self.what == 'missing' else self.what}"


class ContractError(ValueError):
    """A `patch.toml` that cannot be read. Names the file and the field."""


@dataclass(frozen=True)
class Form:
    """One shape of vLLM's code that a patch fits: fingerprints of targets and premises with the versions they were seen in."""

    name: str
    targets: Mapping[str, Mapping[str, tuple]]
    premises: Mapping[str, Mapping[str, tuple]]

    def paths(self) -> dict:
        """Every target and premise, as path -> {fingerprint: versions}."""
        return {**self.targets, **self.premises}

    def differences(self, seen: Mapping[str, str | None]) -> list:
        """A Difference for every target and premise whose fingerprint in `seen` is not a known one."""
        found = []
        for path, known in self.paths().items():
            fingerprint = seen.get(path)
            if fingerprint not in known:
                what = "missing" if fingerprint is None else UNPARSED if fingerprint == UNPARSED else "changed"
                found.append(Difference(path, "target" if path in self.targets else "premise", what))
        return found


@dataclass(frozen=True)
class Contract:
    """A parsed `patch.toml`. `off_by_default` is the reason why a patch waits to be asked for, empty for most.

    `package` is what the patch changes, vLLM for most, and `versions` are the releases of it that the patch is meant for.
    `proof` says how the versions in it were tested, apart from the one that the engine tests run; empty where they were not.
    `libraries` are those that the patch relies on besides vLLM: name -> the versions that it was proven with.
    """

    name: str
    engine: str
    versions: SpecifierSet
    forms: tuple
    prose: Mapping[str, str] = field(default_factory=dict)
    upstream: tuple = ()
    off_by_default: str = ""
    proof: str = ""
    libraries: Mapping[str, tuple] = field(default_factory=dict)
    folder: Path | None = None
    package: str = VLLM

    @property
    def meant(self) -> str:
        """The releases that this patch is meant for, in words."""
        return f"{'vLLM' if self.package == VLLM else self.package} {self.versions}"

    def paths(self) -> set:
        """The paths of all targets and premises of all forms."""
        return {path for form in self.forms for path in form.paths()}

    def meant_for(self, version: str | None) -> bool:
        """Whether this patch is meant for a version of its package. One that cannot be read counts as today's."""
        try:
            return self.versions.contains(Version(version or _TODAYS).base_version, prereleases=True)
        except InvalidVersion:
            return self.versions.contains(_TODAYS)

    def require_libraries(self, admitted: Callable) -> None:
        """Raises Declined where one of the `libraries` cannot be of a version that the patch was proven with.

        `admitted(name)` gives the version that is there, or a specifier of what may be (">=0.2.1,<1"); None where nobody
        knows.
        """
        for name, proven in self.libraries.items():
            there = admitted(name)
            if there is None:
                continue
            # Builds of one version may have local names of their own.
            admits = SpecifierSet(f"=={there.partition('+')[0]}" if there[:1].isdigit() else there)
            if not any(admits.contains(version) for version in proven):
                raise Declined(f"{name} is {there.lstrip('=')}, and this patch was proven with {', '.join(proven)} only")

    def match(self, seen: Mapping[str, str | None]) -> Form:
        """The first form whose every fingerprint is among `seen` (path -> fingerprint, None where the code is missing).

        Raises Declined with the differences of the form that comes closest.
        """
        closest: list | None = None
        for form in self.forms:
            differences = form.differences(seen)
            if not differences:
                return form
            if closest is None or len(differences) < len(closest):
                closest = differences
        raise Declined("; ".join(map(str, closest or ["the contract has no forms"])), closest or ())


def load(folder: Path) -> Contract:
    """Read `folder/patch.toml`. Raises ContractError, which names the file and the field at fault."""
    path = folder / "patch.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ContractError(f"{path}: {error}") from error

    def text(name: str) -> str:
        value = table.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ContractError(f"{path}: {name!r} must be a text")
        return value.strip()

    name = text("name")
    if name.replace("-", "_") != folder.name:
        raise ContractError(f"{path}: 'name' is {name!r}, but the folder is {folder.name!r}")
    package = text("package") if "package" in table else VLLM
    try:
        versions = SpecifierSet(text(package))
    except InvalidSpecifier as error:
        raise ContractError(f"{path}: {package!r}: {error}") from error
    forms = table.get("forms")
    if not isinstance(forms, list) or not forms or not all(isinstance(form, dict) for form in forms):
        raise ContractError(f"{path}: needs at least one [[forms]]")
    return Contract(
        name=name,
        engine=text("engine"),
        versions=versions,
        forms=tuple(_form(path, form) for form in forms),
        prose={key: text(key) for key in PROSE},
        upstream=_texts(f"{path}: 'upstream'", table.get("upstream", [])),
        off_by_default=text("off_by_default") if "off_by_default" in table else "",
        proof=text("proof") if "proof" in table else "",
        libraries=_libraries(path, table.get("libraries", {})),
        folder=folder,
        package=package,
    )


def _libraries(path: Path, table: object) -> dict:
    if not isinstance(table, dict):
        raise ContractError(f"{path}: 'libraries' must be a table of name = [versions]")
    found = {name: _texts(f"{path}: library {name!r}", versions) for name, versions in table.items()}
    for name, versions in found.items():
        for version in versions:
            try:
                Version(version)
            except InvalidVersion:
                raise ContractError(f"{path}: library {name!r}: {version!r} is not a version") from None
    return found


def _form(path: Path, table: Mapping) -> Form:
    def known(kind: str) -> dict:
        result = {}
        for target, fingerprints in table.get(kind, {}).items():
            where = f"{path}: {kind} {target!r}"
            if target.count(":") != 1:
                raise ContractError(f"{where} must read 'module:qualname'")
            if not isinstance(fingerprints, dict):
                raise ContractError(f"{where} must hold fingerprint = [versions]")
            result[target] = {digest: _texts(f"{where} {digest}", known) for digest, known in fingerprints.items()}
        return result

    if not isinstance(table.get("name"), str):
        raise ContractError(f"{path}: every [[forms]] needs a 'name'")
    for kind in ("targets", "premises"):
        if not isinstance(table.get(kind, {}), dict):
            raise ContractError(f"{path}: {kind!r} of form {table['name']!r} must be a table")
    if not table.get("targets"):
        raise ContractError(f"{path}: form {table['name']!r} needs targets")
    return Form(name=table["name"], targets=known("targets"), premises=known("premises"))


def _texts(where: str, value: object) -> tuple:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ContractError(f"{where} must be a list of texts")
    return tuple(value)
