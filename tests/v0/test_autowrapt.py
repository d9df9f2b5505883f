"""In real processes: autowrapt loads the plugin into a vLLM that has no plugin system, and leaves the others alone."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("autowrapt")

OLD = find_spec("vllm.plugins") is None
PROGRAM = """
import sys
from vllm_speedups import plugin
before = "vllm" in sys.modules, plugin.patches()
import vllm.sequence
print("before", before, file=sys.stderr)
print("applied", [patch.name for patch in plugin.patches() if patch.status == "applied"], file=sys.stderr)
print("class", getattr(vllm.sequence.SequenceData, "__vllm_speedups__", "stock"), file=sys.stderr)
"""


def said(program: str = PROGRAM, **environ) -> dict:
    """What a process of its own writes, by the first word of the line."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_SPEEDUPS", "AUTOWRAPT"))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**inherited, **environ}, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stderr.splitlines() if " " in line)


@pytest.mark.skipif(not OLD, reason="this vLLM has a plugin system")
class TestWithoutAPluginSystem:
    def test_the_patches_are_applied_once_vllm_is_imported(self):
        lines = said(AUTOWRAPT_BOOTSTRAP="vllm_speedups")
        assert lines["before"] == "(False, [])"
        assert "sequence-data" in lines["applied"] and lines["class"] == "sequence-data"

    def test_without_the_variable_vllm_is_stock(self):
        assert said()["class"] == "stock"

    def test_our_own_switch_holds_here_too(self):
        assert said(AUTOWRAPT_BOOTSTRAP="vllm_speedups", VLLM_SPEEDUPS_DISABLE="all")["class"] == "stock"

    def test_other_groups_stand_beside_ours(self):
        assert said(AUTOWRAPT_BOOTSTRAP="something_else,vllm_speedups")["class"] == "sequence-data"


@pytest.mark.skipif(OLD, reason="this vLLM has no plugin system")
class TestWithAPluginSystem:
    def test_autowrapt_leaves_loading_to_vllm(self):
        assert said(AUTOWRAPT_BOOTSTRAP="vllm_speedups")["class"] == "stock"

    def test_vllm_loads_the_plugin(self):
        program = "from vllm.plugins import load_general_plugins; load_general_plugins()\n" + PROGRAM
        assert said(program, AUTOWRAPT_BOOTSTRAP="vllm_speedups", VLLM_PLUGINS="vllm_speedups")["class"] == "sequence-data"


def test_a_process_without_vllm_imports_nothing_of_ours_but_the_hook():
    program = "import sys; print('ours', sorted(name for name in sys.modules if name[:4] == 'vllm'), file=sys.stderr)"
    lines = said(program, AUTOWRAPT_BOOTSTRAP="vllm_speedups")
    assert lines["ours"] == "['vllm_speedups', 'vllm_speedups.autoload']"
