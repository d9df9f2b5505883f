"""Whether and which patches are on: VLLM_PLUGINS and VLLM_SPEEDUPS_DISABLE, seen from inside vLLM's own processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm_speedups import plugin
from vllm_speedups.bench.engine import environment
from vllm_speedups.doctor import find_vllm
from vllm_speedups.patching import apply

pytestmark = pytest.mark.engine

# Those for other engines than the installed one's stay away without a word.
KNOWN = plugin.discover()
NAMES = sorted(
    patch.name
    for patch in KNOWN
    if patch.contract.package == "vllm" and patch.contract.meant_for(find_vllm()["version"])
)

# What vLLM does when it starts in a process, and what became of the patches.
LOAD = """
import json
import vllm.plugins
for _ in range(2):
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
import vllm.v1.structured_output.backend_outlines, vllm.v1.worker.gpu_model_runner
import vllm.v1.worker.gpu.structured_outputs
from vllm.v1.structured_output import utils
from vllm_speedups import plugin
print(json.dumps({
    "patches": {patch.name: patch.status for patch in plugin.patches()},
    "gate": getattr(utils.apply_grammar_bitmask, "__vllm_speedups__", None),
    "bound": vllm.v1.worker.gpu_model_runner.apply_grammar_bitmask is utils.apply_grammar_bitmask,
}))
"""


def load(**variables) -> tuple:
    """What LOAD printed, and what it logged, with these variables; None takes one away."""
    environ = {**environment(patched=True), "VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    # So that every patch is on.
    environ["VLLM_SPEEDUPS_CUDA_MASKS"] = "1"
    for name, value in variables.items():
        environ.pop(name, None)
        if value is not None:
            environ[name] = value
    done = subprocess.run([sys.executable, "-c", LOAD], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    return {**seen, "patches": {name: how for name, how in seen["patches"].items() if name in NAMES}}, done.stderr


@pytest.mark.parametrize("choice", [None, "vllm_speedups", "another,vllm_speedups"])
def test_loaded_when_unset_or_named(choice):
    seen, log = load(VLLM_PLUGINS=choice)
    assert seen == {"patches": dict.fromkeys(NAMES, "applied"), "gate": "grammar-masks", "bound": True}
    assert log.count("applied " + ", ".join(NAMES)) == 1


@pytest.mark.parametrize("choice", ["", "another"])
def test_not_loaded_when_empty_or_naming_others(choice):
    seen, log = load(VLLM_PLUGINS=choice)
    assert seen == {"patches": {}, "gate": None, "bound": True}
    assert "vllm-speedups" not in log


@pytest.mark.parametrize("name", NAMES)
def test_each_patch_can_be_switched_off_alone(name):
    import vllm.v1.structured_output.backend_outlines
    import vllm.v1.worker.gpu.structured_outputs  # noqa: F401
    import vllm.v1.worker.gpu_model_runner as runner
    from vllm.v1.structured_output import utils

    patches, stock = plugin.discover(), utils.apply_grammar_bitmask
    apply(patches, plugin.vllm_version(), lambda contract: "off" if contract.name == name else "")
    try:
        statuses = {patch.name: patch.status for patch in patches if patch.name in NAMES}
        assert statuses == {**dict.fromkeys(NAMES, "applied"), name: "disabled"}
        assert (utils.apply_grammar_bitmask is stock) == (name == "grammar-masks")
        assert runner.apply_grammar_bitmask is utils.apply_grammar_bitmask
    finally:
        for patch in patches:
            if patch.active:
                patch.revert()
    assert utils.apply_grammar_bitmask is runner.apply_grammar_bitmask is stock


def test_nonsense_is_one_clear_line_each_and_vllm_goes_on():
    seen, log = load(VLLM_SPEEDUPS_DISABLE="grammer-masks,guidance-history", VLLM_SPEEDUPS_MASK_CACHE_MB="plenty")
    assert seen["patches"] == {**dict.fromkeys(NAMES, "applied"), "guidance-history": "disabled"}
    assert log.count("guidance-history disabled: switched off by the user") == 1
    assert log.count("VLLM_SPEEDUPS_DISABLE names no known patch: grammer-masks (known: ") == 1
    assert log.count("VLLM_SPEEDUPS_MASK_CACHE_MB='plenty' is not a number of MiB") == 1
