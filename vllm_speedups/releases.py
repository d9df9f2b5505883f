"""Releases of vLLM to be read: a wheel, an unpacked tree, an environment, or a version that pip fetches."""

from __future__ import annotations

import ast
import contextlib
import email
import email.message
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from .patching import Source, Tree, Wheel

PACKAGE = "vllm"
DISTRIBUTION = "vllm"
# Where environments keep their packages.
_SITES = ("lib/python*/site-packages", "lib/python*/dist-packages", "Lib/site-packages")
# Modules that have held the version, newest habit first.
_VERSIONS = (f"{PACKAGE}._version:__version__", f"{PACKAGE}.version:__version__", f"{PACKAGE}:__version__")
# For a Python or platform that a release has no wheel for: its wheel is only read, so any will do.
_ANY_WHEEL = [
    "--python-version=3.10", "--implementation=cp", "--abi=cp310", "--abi=abi3", "--platform=manylinux1_x86_64",
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
]  # fmt: skip

# Whose requirements are read, whatever machine reads them.
_X86 = {"extra": "", "platform_machine": "x86_64", "platform_system": "Linux", "sys_platform": "linux"}


# How people call a package.
_NAMES = {PACKAGE: "vLLM"}


class Unreadable(Exception):
    """A target that cannot be read. Its text names it and says what to do."""


class NoWheel(Unreadable):
    """The registry has no wheel of that release that pip would fetch."""


@dataclass(frozen=True)
class Release:
    """One vLLM to be read. `name` is what the user called it, `where` the file or folder; `version` None if not known."""

    name: str
    where: str
    version: str | None
    source: Source
    requirements: tuple = ()

    @property
    def label(self) -> str:
        """What a column or a line is headed with."""
        return self.version or self.name

    def version_of(self, package: str) -> str | None:
        """The version of a package in this release: vLLM itself, or what stands beside it in an environment."""
        if package == PACKAGE or not isinstance(self.source, Tree):
            return self.version if package == PACKAGE else None
        for distribution in importlib_metadata.distributions(path=[str(self.source.root)]):
            if canonicalize_name(distribution.name or "") == canonicalize_name(package):
                return distribution.version
        return None

    def fingerprint(self, path: str) -> str | None:
        """As Source.fingerprint. Raises Unreadable."""
        with _named(self.name):
            return self.source.fingerprint(path)

    def library(self, name: str) -> str | None:
        """The version of a library beside this vLLM, or what its wheel asks for, as a specifier; None if not known."""
        return self.version_of(name) if isinstance(self.source, Tree) else _required(self.requirements, name)

    def lines(self, path: str) -> list:
        """The lines of a definition, none where it is missing or cannot be parsed. Raises Unreadable."""
        with _named(self.name):
            return self.source.lines(path) or []


@contextlib.contextmanager
def opened(target: str, distribution: str = DISTRIBUTION, package: str = PACKAGE) -> Iterator[Release]:
    """The release that a TARGET of the command line means, for as long as it is read. Raises Unreadable.

    `package` may be another one than vLLM for wheels and versions.
    A path that exists is read where it is; a version is fetched by pip into a temporary folder and thrown away.
    """
    with contextlib.ExitStack() as stack:
        path = Path(target).expanduser()
        if not path.exists():
            try:
                Version(target)
            except InvalidVersion:
                raise Unreadable(
                    f"{target}: there is no such file or folder, and it is not a version number: "
                    "give a wheel, a folder with vllm/ in it, an environment, or a version such as 0.32.0"
                ) from None
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-speedups-"))
            path = fetch(target, distribution, Path(folder))
        release = at(path, target, package)
        stack.callback(release.source.close)
        yield release


def at(path: Path, name: str, package: str = PACKAGE) -> Release:
    """The release in a file or folder that exists; its source is to be closed. Raises Unreadable."""
    with _named(name):
        if path.is_dir():
            root = _root(path)
            if root is None:
                raise Unreadable(
                    f"{name}: there is no vLLM in this folder: give one that holds {PACKAGE}/__init__.py, "
                    f"the folder {PACKAGE} itself, or an environment in which vLLM is installed"
                )
            tree = Tree(root)
            return Release(name, str(root / PACKAGE), _installed_version(root) or _written_version(tree), tree)
        wheel = Wheel(path)
        if f"{package}/__init__.py" not in wheel.members:
            wheel.close()
            raise Unreadable(f"{name}: there is no {package}/ in this wheel: give a wheel of {_NAMES.get(package, package)}")
        metadata = _wheel_metadata(wheel)
        version = metadata.get("Version") or _written_version(wheel)
        return Release(name, str(path), version, wheel, tuple(metadata.get_all("Requires-Dist") or ()))


def here(location: str, version: str | None) -> Release:
    """The vLLM of this environment, whose package folder is `location`."""
    return Release("this environment", location, version, Tree(Path(location).parent))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """What cannot be read is Unreadable, and named."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise Unreadable(f"{name}: cannot be read ({why}): give a whole wheel of vLLM, or a readable folder") from error


def _root(folder: Path) -> Path | None:
    """The folder that holds the package: the folder itself, its parent, or one of an environment's."""
    places = [folder, *(site for pattern in _SITES for site in sorted(folder.glob(pattern)))]
    for place in places:
        if (place / PACKAGE / "__init__.py").is_file():
            return place
    whole = folder.resolve()
    return whole.parent if whole.name == PACKAGE and (whole / "__init__.py").is_file() else None


def _installed_version(root: Path) -> str | None:
    """The version of the distribution in `root` that provides the package: its record, or its name, says so."""
    named = None
    for distribution in importlib_metadata.distributions(path=[str(root)]):
        if f"{PACKAGE}/__init__.py" in (distribution.read_text("RECORD") or ""):
            return distribution.version
        if canonicalize_name(distribution.name or "") == PACKAGE:
            named = distribution.version
    return named


def _wheel_metadata(wheel: Wheel) -> email.message.Message:
    for member in wheel.members:
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", member):
            return email.message_from_bytes(wheel.member(member))
    return email.message.Message()


def _required(requirements: Iterable, name: str) -> str | None:
    """What a wheel for Linux on x86-64 asks of a library, as a specifier, or None where it does not name it."""
    for text in requirements:
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(text)
            if canonicalize_name(wanted.name) == canonicalize_name(name) and (
                wanted.marker is None or wanted.marker.evaluate(_X86)
            ):
                return str(wanted.specifier)
    return None


def _written_version(source: Source) -> str | None:
    """The version that the package's own source gives as a plain text, read and not run."""
    for path in _VERSIONS:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            value = getattr(source.definition(path), "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return value.value
    return None


def fetch(version: str, distribution: str, folder: Path) -> Path:
    """Have pip download the wheel of a release into `folder`. Raises Unreadable with pip's own reason."""
    command = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--ignore-requires-python"]
    wanted = [f"--dest={folder}", f"{distribution}=={version}"]
    if sys.stderr.isatty():
        print(f"fetching {distribution} {version}, some hundred MB", file=sys.stderr)
    done = _pip(*command, *wanted)
    if done.returncode and "No matching distribution" in done.stderr:
        done = _pip(*command, *_ANY_WHEEL, *wanted)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        # An index that cannot be reached counts as one that lists nothing.
        listed = "(from versions: " in done.stderr and "(from versions: none)" not in done.stderr
        raise (NoWheel if listed else Unreadable)(
            f"{version}: pip could not fetch {distribution}=={version} ({_why(done.stderr)}): "
            "give another version, or the path of a wheel"
        )
    return wheels[0]


def published(distribution: str, oldest: str) -> list:
    """The stable releases that the registry lists from `oldest` on, in order. Raises Unreadable."""
    done = _pip("index", "versions", "--ignore-requires-python", distribution)
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or listed is None:
        raise Unreadable(f"{distribution}: pip could not list its releases: {_why(done.stderr)}")
    versions = {text.strip() for text in listed[1].split(",")}
    return sorted((text for text in versions if Version(text) >= Version(oldest)), key=Version)


def wheels_in(folder: Path, distribution: str) -> dict:
    """The wheels of a distribution that lie in a folder: version -> file."""
    found = {}
    for file in sorted(folder.glob("*.whl")):
        with contextlib.suppress(InvalidWheelFilename):
            name, version, _, _ = parse_wheel_filename(file.name)
            if name == canonicalize_name(distribution):
                found[str(version)] = file
    return found


def _pip(*arguments: str) -> subprocess.CompletedProcess:
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, env=environ)


def _why(said: str) -> str:
    """The line of pip's that says what is wrong."""
    if "No module named pip" in said:
        return "this environment has no pip"
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line.partition("ERROR: ")[2] for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]
