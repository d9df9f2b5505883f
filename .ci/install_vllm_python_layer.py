"""Make an environment with a V0 release's own Python code: .venv/bin/python .ci/install_vllm_python_layer.py 0.4.2 FOLDER

Its sequences, scheduler, block managers and logits processors run as they are under a newer CPU build of torch, and
without the release's compiled library. The torch of the interpreter that runs this is linked, not copied.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

# What only a device, a cluster or a build needs: nothing of it is imported by the layers named above.
LEFT_OUT = re.compile(
    r"(torch|torchvision|torchaudio|triton|xformers|vllm-flash-attn|vllm-nccl-cu12|ray|cmake|ninja"
    r"|opencv-python-headless|depyf|opentelemetry.*|watchfiles|tensorizer)$",
    re.IGNORECASE,
)

# Versions that the release's own bounds leave open and its code does not.
PINS = {
    "0.4.2": ["transformers==4.40.2", "numpy<2"],
    "0.5.5": ["transformers==4.44.2", "numpy<2", "outlines==0.0.46", "pyarrow<20"],
    "0.8.5": ["transformers==4.51.3", "numpy<2.3", "scipy<1.18"],
}
TESTS = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "setuptools<81", "autowrapt>=1.0"]


def run(*command: str) -> None:
    """Run a command quietly. Ends the program with the command's own message if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")


def link(package: str, site: Path) -> None:
    """Link all top-level entries that an installed package of this interpreter has in site-packages."""
    files = importlib.metadata.distribution(package).files or []
    here = Path(sysconfig.get_path("purelib"))
    for name in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        target = site / name
        if not target.exists():
            target.symlink_to(here / name)


def requirements(wheel: Path) -> list:
    """What the wheel asks for, but what LEFT_OUT names."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    return [line for line in wanted if not LEFT_OUT.match(re.match(r"[\w.-]+", line).group())]


def unpack(wheel: Path, site: Path) -> None:
    """The wheel's Python code and metadata, without the compiled libraries: they need CUDA's, and are most of it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, [name for name in archive.namelist() if not name.endswith(".so")])


def main(version: str, folder: str) -> None:
    """Make the environment and install the release, what it asks for, and the tools that the tests use."""
    venv.create(folder, with_pip=False, clear=True)
    root = Path(folder).resolve()
    site = next(root.glob("lib/python*")) / "site-packages"
    # 0.4.2 imports triton unasked; later releases do without, and not with every version of it.
    for package in ("torch", "triton") if version == "0.4.2" else ("torch",):
        link(package, site)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as wheels:
        run(*pip, "download", "--no-deps", "--only-binary", ":all:", "-d", wheels, f"vllm=={version}")
        wheel = next(Path(wheels).glob("*.whl"))
        listed = Path(wheels, "requirements.txt")
        listed.write_text("\n".join([*requirements(wheel), "torch", *PINS.get(version, []), *TESTS]))
        run(*pip, "--python", str(root / "bin/python"), "install", "--no-compile", "-r", str(listed))
        unpack(wheel, site)
    if version == "0.5.5":
        # outlines 0.0.46 imports this list for one of its types; the package of that name in the index is empty.
        (site / "pyairports").mkdir()
        (site / "pyairports" / "__init__.py").touch()
        (site / "pyairports" / "airports.py").write_text("AIRPORT_LIST = []\n")
    project = Path(__file__).resolve().parent.parent
    run(*pip, "--python", str(root / "bin/python"), "install", "-e", str(project))


if __name__ == "__main__":
    os.environ.setdefault("PIP_NO_INPUT", "1")
    main(sys.argv[1], sys.argv[2])
