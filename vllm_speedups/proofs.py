"""Proofs: on which releases the tests of a patch were run, and how, kept in `patches/proofs.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from .facts import runs, unrolled

PROOFS = Path("patches", "proofs.json")
ENGINE, OWN_CODE = "engine", "own code"


@dataclass
class Proofs:
    """What was run: patch -> release -> (kind, libraries besides vLLM as "name version", comma-separated)."""

    releases: list
    known: dict = field(default_factory=dict)

    def kind(self, patch: str, version: str) -> str:
        """How a patch was tested on a release, or an empty text."""
        return self.known.get(patch, {}).get(version, ("", ""))[0]

    def note(self, patch: str, version: str, kind: str | None, libraries: list) -> None:
        """Remember how a patch was tested on a release; None where it did not pass. An engine says more than code."""
        known = self.known.setdefault(patch, {})
        if kind is None:
            known.pop(version, None)
        elif kind == ENGINE or known.get(version, ("",))[0] != ENGINE:
            known[version] = kind, ", ".join(libraries)

    def dump(self) -> str:
        """As JSON: patch -> kind -> libraries -> the releases, as runs of neighbours."""
        table: dict = {}
        for patch in sorted(self.known):
            grouped: dict = {}
            for version in sorted(self.known[patch], key=self.releases.index):
                kind, libraries = self.known[patch][version]
                grouped.setdefault(kind, {}).setdefault(libraries, []).append(version)
            table[patch] = {
                kind: {libraries: runs(versions, self.releases) for libraries, versions in sorted(by.items())}
                for kind, by in sorted(grouped.items())
            }
        return json.dumps(table, indent=1) + "\n"

    @classmethod
    def load(cls, releases: list, file: Path = PROOFS) -> Proofs:
        """What the checkout's file says; nothing where there is none."""
        proofs = cls(releases)
        table = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for patch, kinds in table.items():
            proofs.known[patch] = {
                version: (kind, libraries)
                for kind, by in kinds.items()
                for libraries, text in by.items()
                for version in unrolled(text, releases)
            }
        return proofs
