"""docs/writing-a-patch.md, followed to the letter: its files written, its commands run, their output as the page has it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_speedups.compatibility import ENGINE
from vllm_speedups.doctor import find_vllm

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "writing-a-patch.md"
BLOCK = re.compile(r'^```(?P<kind>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)^```$', re.DOTALL | re.MULTILINE)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """What the page needs of the project, to write in, as if installed from there."""
    shutil.copytree(ROOT / "vllm_speedups", tmp_path / "vllm_speedups", ignore=shutil.ignore_patterns("patches"))
    shutil.copytree(ROOT / "patches", tmp_path / "patches", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "vllm_speedups" / "patches").symlink_to(tmp_path / "patches")
    (tmp_path / "tests" / "patches").mkdir(parents=True)
    return tmp_path


def run(command: str, folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}exit status {done.returncode}\n"


def matches(expected: str, output: str) -> bool:
    """`...` stands for anything, a line of its own for any lines."""
    lines = expected.splitlines(keepends=True)
    pattern = (r"(?:.*\n)*?" if line == "...\n" else re.escape(line).replace(re.escape("..."), ".*") for line in lines)
    return re.fullmatch("".join(pattern), output) is not None


@pytest.mark.skipif((find_vllm() or {}).get("version") != ENGINE, reason=f"the page is about vLLM {ENGINE}")
def test_the_page_works_as_it_stands(checkout):
    ran, output = 0, ""
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["file"]:
            (checkout / block["file"]).write_text(block["text"], encoding="utf-8")
        elif block["kind"] == "sh":
            output, ran = run(block["text"], checkout), ran + 1
        else:
            assert block["kind"] == "text" and matches(block["text"], output), output
    assert ran == 4


def test_output_is_compared_in_full_but_for_dots():
    assert matches("1 passed in ...\n", "1 passed in 0.1 s\n")
    assert matches("...\na\n", "b\nc\na\n") and matches("...\na\n", "a\n")
    assert not matches("a\n", "a\nb\n") and not matches("...\na\n", "a\nb\n") and not matches("1 passed in ...\n", "")
