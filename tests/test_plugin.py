"""The entry point on real vLLM: who chooses it, what it says, what it refuses, and the way back.

Importing vLLM takes seconds, so one process imports it and every scenario runs in a fork of that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from vllm_speedups import settings
from vllm_speedups.doctor import find_vllm
from vllm_speedups.plugin import discover

pytest.importorskip("vllm")

KNOWN = discover()
# Those for other engines than the installed one's stay away without a word.
PATCHES = sorted(
    patch.name
    for patch in KNOWN
    if patch.contract.package == "vllm" and patch.contract.meant_for(find_vllm()["version"])
)

ZYGOTE = """
import json, logging, os, sys, traceback
import torch
torch.set_num_threads(1)
import vllm.plugins, vllm.v1.core.kv_cache_utils, vllm.v1.structured_output.utils as utils
from vllm.v1.structured_output import backend_guidance, backend_outlines, backend_xgrammar
import vllm.v1.worker.gpu.structured_outputs

answers = os.fdopen(int(sys.argv[1]), "w")
for line in sys.stdin:
    task = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        os.environ.update(task["environ"])
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
        logging.getLogger("vllm.speedups").addHandler(handler)
        logging.getLogger("vllm.speedups").setLevel(logging.INFO)
        answer = {}
        scope = {"answer": answer, "utils": utils, "said": said}
        try:
            exec(task["code"], scope)
        except BaseException as error:
            answer.update(raised=type(error).__name__, message=str(error), trace=traceback.format_exc())
        with os.fdopen(write, "w") as out:
            json.dump({"said": said, **answer}, out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as result:
        print(result.read() or "{}", file=answers, flush=True)
    os.waitpid(child, 0)
os._exit(0)
"""

LOAD = """
from vllm.plugins import load_general_plugins
from vllm_speedups import plugin
stock = utils.apply_grammar_bitmask
load_general_plugins()
meant = [patch for patch in plugin.patches() if patch.status != "not meant"]
answer["patches"] = {patch.name: [patch.status, patch.reason] for patch in meant}
answer["replaced"] = utils.apply_grammar_bitmask is not stock
answer["version"] = plugin.vllm_version()
"""


@pytest.fixture(scope="module")
def zygote():
    read, write = os.pipe()
    # Other tests may have told vLLM to be silent.
    ours = (*settings.VARIABLES, "VLLM_PLUGINS", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM")
    environ = {key: value for key, value in os.environ.items() if key not in ours}
    # So that every patch is on.
    environ[settings.CUDA_MASKS] = "1"
    process = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE, str(write)], stdin=subprocess.PIPE, pass_fds=[write], env=environ, text=True
    )
    os.close(write)
    with os.fdopen(read) as answers:
        yield process, answers
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.fixture
def run(zygote):
    """Runs code in a process that has imported vLLM; gives its `answer`, with all that the plugin `said`."""
    process, answers = zygote

    def run(code: str = LOAD, **environ) -> dict:
        process.stdin.write(json.dumps({"code": textwrap.dedent(code), "environ": environ}) + "\n")
        process.stdin.flush()
        return json.loads(answers.readline())

    return run


def lines(answer: dict, level: str) -> list:
    return [text for said, text in answer["said"] if said == level]


@pytest.mark.parametrize("choice", [None, "vllm_speedups", "other,vllm_speedups"])
def test_vllm_loads_it_where_VLLM_PLUGINS_allows(run, choice):
    answer = run(**({} if choice is None else {"VLLM_PLUGINS": choice}))
    assert "raised" not in answer, answer
    assert answer["replaced"] and sorted(answer["patches"]) == PATCHES
    assert {status for status, _ in answer["patches"].values()} == {"applied"}
    (line,) = lines(answer, "INFO")
    assert "vllm-speedups" in line and answer["version"] in line and all(name in line for name in PATCHES)
    assert lines(answer, "WARNING") == [] and lines(answer, "ERROR") == []


def test_what_is_off_by_default_stays_off_without_a_word_until_it_is_asked_for(run):
    answer = run(**{settings.CUDA_MASKS: "0"})
    status, reason = answer["patches"]["worker-masks"]
    assert status == "disabled" and settings.CUDA_MASKS in reason
    (line,) = lines(answer, "INFO")
    assert "worker-masks" not in line and lines(answer, "WARNING") == []


@pytest.mark.parametrize("choice", ["", "other", "other,another"])
def test_vllm_does_not_load_it_where_VLLM_PLUGINS_leaves_it_out(run, choice):
    answer = run(VLLM_PLUGINS=choice)
    assert "raised" not in answer, answer
    assert not answer["replaced"] and answer["patches"] == {} and answer["said"] == []


@pytest.mark.parametrize("collects", [True, False])
def test_registering_leaves_the_garbage_collector_as_it_was(run, collects):
    code = f"import gc; gc.{'enable' if collects else 'disable'}()" + LOAD + "answer['collects'] = gc.isenabled()"
    assert run(code)["collects"] is collects


def test_registering_again_changes_and_says_nothing(run):
    answer = run(
        LOAD
        + """
import vllm.plugins
gate = utils.apply_grammar_bitmask
vllm.plugins.plugins_loaded = False
load_general_plugins()
plugin.register()
answer["same"] = utils.apply_grammar_bitmask is gate
"""
    )
    assert answer["same"] and len(answer["said"]) == 1


def test_one_line_names_what_was_applied_and_what_was_not_and_why(run):
    answer = run(VLLM_SPEEDUPS_DISABLE="grammar-masks")
    assert not answer["replaced"] and answer["patches"]["grammar-masks"][0] == "disabled"
    assert [status for name, (status, _) in answer["patches"].items() if name != "grammar-masks"] == ["applied"] * (
        len(PATCHES) - 1
    )
    (line,) = lines(answer, "INFO")
    applied, _, rest = line.partition(" | ")
    assert "grammar-masks" not in applied and "outlines-states" in applied
    assert rest == "grammar-masks disabled: switched off by the user"


def test_the_line_shows_also_where_vllm_has_not_set_up_its_logging_yet(run):
    answer = run(
        """
        import contextlib, io, logging
        logger = logging.getLogger("vllm.speedups")
        for name in ("vllm.speedups", "vllm", None):
            logging.getLogger(name).handlers.clear()
        logger.setLevel(logging.NOTSET)
        from vllm_speedups import plugin
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            plugin.register()
        answer["shown"] = shown.getvalue()
        """
    )
    assert answer["shown"].count("\n") == 1 and answer["shown"].startswith("INFO ")
    assert all(name in answer["shown"] for name in PATCHES)


@pytest.mark.parametrize("name", PATCHES)
def test_each_patch_can_be_disabled_alone(run, name):
    answer = run(VLLM_SPEEDUPS_DISABLE=name)
    assert {patch for patch, (status, _) in answer["patches"].items() if status == "disabled"} == {name}
    assert lines(answer, "WARNING") == []


def test_all_switches_everything_off(run):
    answer = run(VLLM_SPEEDUPS_DISABLE="all")
    assert {status for status, _ in answer["patches"].values()} == {"disabled"} and not answer["replaced"]
    assert lines(answer, "WARNING") == [] and "applied nothing" in lines(answer, "INFO")[0]


def test_unknown_names_are_one_warning_that_lists_the_known_ones(run):
    answer = run(VLLM_SPEEDUPS_DISABLE="grammar_masks,gramar-masks,outlines-states")
    (warning,) = lines(answer, "WARNING")
    known = warning[warning.index("(known:") :]
    assert "VLLM_SPEEDUPS_DISABLE" in warning and all(patch.name in known for patch in KNOWN)
    assert "grammar_masks, gramar-masks (" in warning
    assert answer["patches"]["grammar-masks"][0] == "applied" and answer["patches"]["outlines-states"][0] == "disabled"


def test_nonsense_settings_are_warned_about_and_everything_still_applies(run):
    answer = run(VLLM_SPEEDUPS_MASK_CACHE_MB="1e308", VLLM_SPEEDUPS_ROW_CACHE_MB="lots", VLLM_SPEEDUPS_STRICT="perhaps")
    assert {status for status, _ in answer["patches"].values()} == {"applied"}
    warnings = lines(answer, "WARNING")
    assert len(warnings) == 3
    for variable in (settings.MASK_CACHE_MB, settings.ROW_CACHE_MB, settings.STRICT):
        assert sum(variable in warning for warning in warnings) == 1


TAMPER = """
import pathlib, tempfile
from vllm_speedups.patching import targets
real = targets.source_file
copy = pathlib.Path(tempfile.mkdtemp(), "utils.py")
source = real("vllm.v1.structured_output.utils").read_text()
assert source.count("skip_out_indices = len(out_indices) == logits.shape[0]") == 1
copy.write_text(source.replace("len(out_indices) == logits.shape[0]", "len(out_indices) >= logits.shape[0]"))
targets.source_file = lambda module: copy if module == "vllm.v1.structured_output.utils" else real(module)
"""


def test_a_vllm_whose_target_was_changed_keeps_it_and_hears_why(run):
    answer = run(TAMPER + LOAD)
    assert "raised" not in answer and not answer["replaced"]
    assert answer["patches"].pop("grammar-masks") == [
        "declined",
        "vllm.v1.structured_output.utils:apply_grammar_bitmask changed",
    ]
    assert {status for status, _ in answer["patches"].values()} == {"applied"}
    (line,) = lines(answer, "INFO")
    assert "grammar-masks declined: vllm.v1.structured_output.utils:apply_grammar_bitmask changed" in line


def test_strict_makes_a_changed_target_an_error_at_every_load(run):
    answer = run(
        TAMPER
        + """
from vllm_speedups import plugin
from vllm.plugins import load_general_plugins
try:
    load_general_plugins()
except plugin.PatchNotApplied:
    answer["first"] = True
plugin.register()
""",
        VLLM_SPEEDUPS_STRICT="1",
    )
    assert answer["first"] and answer["raised"] == "PatchNotApplied"
    assert "grammar-masks: vllm.v1.structured_output.utils:apply_grammar_bitmask changed" in answer["message"]
    assert "outlines-states" not in answer["message"]


def test_strict_passes_where_everything_applies_and_has_proven_it(run):
    answer = run(LOAD + "answer['proven'] = [patch._proven for patch in meant]", VLLM_SPEEDUPS_STRICT="1")
    assert "raised" not in answer, answer
    assert {status for status, _ in answer["patches"].values()} == {"applied"} and set(answer["proven"]) == {True}


def test_strict_does_not_mind_what_the_user_switched_off(run):
    answer = run(TAMPER + LOAD, VLLM_SPEEDUPS_STRICT="1", VLLM_SPEEDUPS_DISABLE="grammar-masks")
    assert "raised" not in answer, answer


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_plugin_that_cannot_start_raises_only_where_strict(run, strict):
    answer = run(
        """
        from vllm_speedups import plugin
        def broken():
            raise RuntimeError("cannot start")
        plugin.discover = broken
        plugin.register()
        """,
        VLLM_SPEEDUPS_STRICT=strict,
    )
    assert answer.get("message") == ("cannot start" if strict == "1" else None)
    assert strict == "1" or ["stock" in text for text in lines(answer, "ERROR")] == [True]


SET = {name: "1" for name in settings.VARIABLES if name != settings.DISABLE}
SET[settings.DISABLE] = "block-hashes"


def test_vllm_knows_our_variables_and_accepts_them(run):
    validate = """
from vllm.platforms import current_platform
current_platform.validate_environ(hard_fail=True)
"""
    assert run(validate, **SET)["raised"] == "ValueError"
    answer = run(LOAD + validate, **SET)
    assert "raised" not in answer, answer


def test_the_key_of_vllms_compile_cache_does_not_depend_on_us(run):
    factors = "import vllm.envs\nfactors = {key: str(value) for key, value in vllm.envs.compile_factors().items()}\n"
    unset = f"import os\nos.environ.pop({settings.CUDA_MASKS!r})\n"
    answer = run(unset + factors + "before = factors\n" + LOAD + factors + "answer['same'] = before == factors")
    assert answer["same"]
    one = run(LOAD + factors + "answer['factors'] = factors", **SET)
    other = run(LOAD + factors + "answer['factors'] = factors", **{**SET, settings.MASK_CACHE_MB: "2"})
    assert one["factors"] == other["factors"]


def test_a_revert_restores_stock_everywhere(run):
    answer = run(
        """
        import sys
        from vllm_speedups import plugin
        from vllm_speedups.patching.targets import resolve
        from vllm_speedups.doctor import find_vllm
        version = find_vllm()["version"]
        patches = [p for p in plugin.discover() if p.contract.package == "vllm" and p.contract.meant_for(version)]
        paths = [path for patch in patches for form in patch.contract.forms for path in form.targets]
        stock = {path: resolve(path) for path in paths}
        importers = {}
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if any(value is target for target in stock.values()):
                    importers[module.__name__, name] = value
        plugin.register()
        answer["replaced"] = all(resolve(path) is not stock[path] for path in paths)
        answer["rebound"] = all(getattr(sys.modules[m], n) is not value for (m, n), value in importers.items())
        plugin.revert()
        answer["restored"] = all(resolve(path) is stock[path] for path in paths)
        answer["restored too"] = all(getattr(sys.modules[m], n) is value for (m, n), value in importers.items())
        answer["statuses"] = [patch.status for patch in plugin.patches() if patch.status != "not meant"]
        """
    )
    assert "raised" not in answer, answer
    assert all(answer[key] for key in ("replaced", "rebound", "restored", "restored too"))
    assert set(answer["statuses"]) == {"reverted"}


def test_a_target_that_another_plugin_wrapped_is_left_to_it_and_named(run):
    answer = run(
        """
        import functools
        theirs = utils.apply_grammar_bitmask
        @functools.wraps(theirs)
        def wrapper(*args):
            return theirs(*args)
        utils.apply_grammar_bitmask = wrapper
        """
        + textwrap.indent(LOAD, " " * 8)
    )
    assert "raised" not in answer, answer
    assert not answer["replaced"]
    status, reason = answer["patches"]["grammar-masks"]
    assert status == "declined" and "was replaced by" in reason and "apply_grammar_bitmask" in reason
