"""Every Python from 3.9 to 3.13 reads the same fingerprints out of releases' own code, target by target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from unpacked import CONTRACTS, FACTS_NOW, folders

from vllm_speedups import patching

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13")

# Reads with the reader alone: other interpreters lack what the package needs besides.
SCRIPT = """
import json, sys, types
from pathlib import Path
alone = types.ModuleType("alone"); alone.__path__ = [sys.argv[1]]
contract = types.ModuleType("alone.contract"); contract.UNPARSED = "unparsed"
sys.modules.update({"alone": alone, "alone.contract": contract})
from alone.sources import Tree
found = {}
task = json.load(sys.stdin)
for version, folder in task["folders"].items():
    tree = Tree(Path(folder))
    found[version] = {path: tree.fingerprint(path) for path in task["paths"]}
    tree.forget()
print(json.dumps(found))
"""


def interpreter(version: str) -> str | None:
    """A CPython of that version on this machine, or None."""
    if tuple(map(int, version.split("."))) == sys.version_info[:2]:
        return sys.executable
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else None


@pytest.mark.parametrize("version", PYTHONS)
def test_a_python_reads_the_fingerprints_that_the_facts_hold(version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    paths = sorted({path for contract in CONTRACTS.values() for path in contract.paths()})
    task = {"folders": {release: str(folder) for release, folder in folders().items()}, "paths": paths}
    command = [python, "-I", "-W", "ignore", "-c", SCRIPT, str(Path(patching.__file__).parent)]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found, read = json.loads(done.stdout), 0
    for release, seen in found.items():
        for path, digest in seen.items():
            assert digest == FACTS_NOW.fingerprint(path, release), (release, path)
            read += digest is not None
    print(f"Python {version}: {read} fingerprints of {len(found)} releases, {len(paths)} targets and premises, equal")
