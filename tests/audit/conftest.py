"""Small wheels, trees and environments, made of the modules of the installed vLLM that contracts look at."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from vllm_speedups.cli import main
from vllm_speedups.doctor import find_vllm
from vllm_speedups.patching.sources import split
from vllm_speedups.patching.targets import source_file
from vllm_speedups.plugin import discover

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.8,<3.10\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: false\nTag: {tag}\n"


class Sources(dict):
    """The text of modules, by file name below the folder that holds `vllm/`. What is made is about vLLM 0.32."""

    def changed(self, module: str, old: str, new: str) -> Sources:
        """A copy in which one text of one module is another."""
        name = module.replace(".", "/") + ".py"
        assert self[name].count(old) >= 1
        return Sources({**self, name: self[name].replace(old, new, 1)})

    def without(self, module: str) -> Sources:
        """A copy without a module."""
        return Sources({name: text for name, text in self.items() if name != module.replace(".", "/") + ".py"})

    def files(self, version, name: str = "vllm", tag: str = "py3-none-any") -> dict:
        """All files of a wheel, its record included; without the record where the version is None."""
        files = dict(self)
        if version is not None:
            info = f"{name.replace('-', '_')}-{version}.dist-info"
            files[f"{info}/METADATA"] = METADATA.format(name=name, version=version)
            files[f"{info}/WHEEL"] = WHEEL.format(tag=tag)
            files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
        return files

    def wheel(self, folder: Path, version: str = "0.32.0", name: str = "vllm", tag: str = "py3-none-any") -> Path:
        """Write a wheel into a folder."""
        file = folder / f"{name.replace('-', '_')}-{version}-{tag}.whl"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, text in self.files(version, name, tag).items():
                archive.writestr(member, text)
        return file

    def tree(self, root: Path, version=None, name: str = "vllm") -> Path:
        """Write `vllm/` into a folder, and the distribution's record where there is a version."""
        for member, text in self.files(version, name).items():
            file = root / member
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return root


@pytest.fixture(scope="session")
def sources() -> Sources:
    """The installed modules. The package itself ends the process if it is imported."""
    if find_vllm() is None:
        pytest.skip("made of the installed vLLM")
    modules = {split(path)[0] for patch in discover() for path in patch.contract.paths()}
    files = {module: source_file(module) for module in sorted(modules)}
    # The installed vLLM lacks what V0 patches are for.
    texts = {f"{module.replace('.', '/')}.py": file.read_text(encoding="utf-8") for module, file in files.items() if file}
    return Sources({"vllm/__init__.py": "raise SystemExit('imported')\n", **texts})


@pytest.fixture
def vs(capsys):
    """Runs the command line. Gives its exit status and what it wrote to both streams."""

    def vs(*arguments) -> tuple:
        status = main([str(argument) for argument in arguments])
        return (status, *capsys.readouterr())

    return vs
