"""Another plugin for tests: a package with an entry point of its own that vLLM's loader finds, before ours or after it."""

from __future__ import annotations

import textwrap
from pathlib import Path

NAME = "toy_speedups"


def make(folder: Path, register: str, name: str = NAME) -> Path:
    """Write an installed package whose `register()` runs this code. Gives the folder that belongs on `sys.path`."""
    root = folder / f"{name}-site"
    root.mkdir()
    (root / f"{name}.py").write_text("def register():\n" + textwrap.indent(textwrap.dedent(register), "    "))
    info = root / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
    return root
