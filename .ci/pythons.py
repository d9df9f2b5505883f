"""The wheel in dist/ on every supported Python found here: python .ci/pythons.py [VERSION ...]

For each of 3.9 to 3.13, as `pythonX.Y` on the PATH or from pyenv, in a new environment with the wheel and what it asks for: the
import, `vllm-speedups --help`, `doctor` without vLLM, and `audit` of a folder with a `vllm/` in it.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")


def interpreter(version: str) -> str:
    """A CPython of that version, empty where there is none."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}") or ""


def run(*command: str, status: int = 0) -> str:
    """The output of a command. Ends the program where it ends with another status."""
    # Not in the checkout, whose package would be found before the installed one.
    done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
    if done.returncode != status:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def check(python: str, wheel: Path, folder: Path) -> None:
    """Everything for one interpreter. Ends the program at the first thing that fails."""
    run(python, "-m", "venv", str(folder / "env"))
    run(str(folder / "env/bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel))
    command = str(folder / "env/bin/vllm-speedups")
    version = run(command, "--version").strip()
    found = run(str(folder / "env/bin/python"), "-c", "import vllm_speedups as v; print(v.__version__, v.__file__)")
    assert found.split()[0] == version and str(folder) in found, found
    assert "doctor" in run(command, "--help")
    assert "not installed" in run(command, "doctor", status=2)
    tree = folder / "tree" / "vllm" / "utils"
    tree.mkdir(parents=True)
    for package in (tree.parent, tree):
        (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    report = json.loads(run(command, "audit", "--json", str(folder / "tree"), status=1))
    patches = report["targets"][0]["patches"]
    assert len(patches) == len(list((ROOT / "patches").glob("*/patch.toml"))), patches
    assert {"declined"} <= {patch["status"] for patch in patches}, patches


def main() -> int:
    """0: all that are here passed."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit("dist/ must hold one wheel: run `make dist` first")
    for version in sys.argv[1:] or VERSIONS:
        python = interpreter(version)
        if python:
            with tempfile.TemporaryDirectory() as folder:
                check(python, wheels[0], Path(folder))
        print(f"Python {version}: {'as it should be' if python else 'none here'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
