"""The real releases to test on: the installed vLLM, and those that lie unpacked in VLLM_SPEEDUPS_RELEASES, by version."""

from __future__ import annotations

import os
from pathlib import Path

from packaging.version import Version

from vllm_speedups import compatibility, releases
from vllm_speedups.doctor import find_vllm
from vllm_speedups.facts import FACTS, Facts
from vllm_speedups.patching import VLLM
from vllm_speedups.plugin import discover

ROOT = Path(__file__).parents[2]
CONTRACTS = {patch.name: patch.contract for patch in discover() if patch.contract.package == VLLM}
FACTS_NOW = Facts.load((ROOT / FACTS).read_text(encoding="utf-8"))


def folders() -> dict:
    """Version -> the folder that holds `vllm/`, of all releases at hand of which there are facts."""
    found = {}
    installed, folder = find_vllm(), os.environ.get("VLLM_SPEEDUPS_RELEASES")
    if installed:
        found[installed["version"]] = Path(installed["location"]).parent
    for root in Path(folder).iterdir() if folder else ():
        if (root / "vllm" / "__init__.py").is_file():
            found[root.name] = root
    return {version: found[version] for version in sorted(set(found) & set(FACTS_NOW.releases), key=Version)}


def applied() -> list:
    """(contract's name, version) wherever the matrix says applied, newest release first."""
    return [
        (name, version)
        for version in reversed(FACTS_NOW.releases)
        for name, contract in CONTRACTS.items()
        if compatibility.cell(contract, version, FACTS_NOW).verdict.status == "applied"
    ]


def opened(version: str) -> releases.Release:
    """A release at hand, to be read."""
    return releases.at(folders()[version], version)
