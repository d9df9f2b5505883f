"""Build dist/ twice and compare: python .ci/dist.py. Wheel and sdist must have the same bytes, and pass twine.

Times in archives come from SOURCE_DATE_EPOCH, which is set to that of the last commit where the caller has not set it. What is
built is the last commit, not the working tree. Wheels heed that variable by themselves; an sdist is packed anew here.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, **more) -> bytes:
    """Run quietly. Ends the program with what the command said if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout.decode(errors='replace')[-4000:]}")
    return done.stdout


def build(commit: str, folder: Path, epoch: int) -> dict:
    """Build a commit below `folder`: name -> file of what came out."""
    source = folder / "source"
    source.mkdir()
    with tarfile.open(fileobj=io.BytesIO(run("git", "archive", commit, cwd=ROOT))) as archive:
        archive.extractall(source)
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    run(sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(source), env=environ)
    for sdist in (folder / "dist").glob("*.tar.gz"):
        repack(sdist, epoch)
    return {file.name: file for file in sorted((folder / "dist").iterdir())}


def repack(sdist: Path, epoch: int) -> None:
    """The same files in order of their names, of nobody, at one time."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with open(sdist, "wb") as out, gzip.GzipFile("", "wb", fileobj=out, mtime=epoch) as zipped:
        zipped.write(packed.getvalue())


def main() -> int:
    """0: dist/ holds what two builds agreed on."""
    # Named once: somebody may commit between the two builds.
    commit = run("git", "rev-parse", "HEAD", cwd=ROOT).decode().strip()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct", commit, cwd=ROOT))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        built, again = build(commit, Path(one), epoch), build(commit, Path(other), epoch)
        different = [name for name in built if name not in again or built[name].read_bytes() != again[name].read_bytes()]
        if different or set(built) != set(again):
            sys.exit(f"two builds differ: {', '.join(different) or f'{sorted(built)} and {sorted(again)}'}")
        run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values()))
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(Path(one) / "dist", ROOT / "dist")
    for name in built:
        print(f"{hashlib.sha256((ROOT / 'dist' / name).read_bytes()).hexdigest()}  dist/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
