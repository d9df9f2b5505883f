"""`sequence-data` beside the own `vllm/sequence.py` of unpacked releases that need not run here.

VLLM_SPEEDUPS_RELEASES names a folder that holds one folder a release, called by its version and holding `vllm/` as in its
wheel: read are `sequence.py` and `inputs/data.py`. What they import and this environment has not is `Any`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import sys
import types
import typing
from pathlib import Path

import pytest
import vllm.sequence
from packaging.version import Version

from vllm_speedups.patches import sequence_data as glue
from vllm_speedups.patching import Context, Tree, load

CONTRACT = load(Path(__file__).parents[2] / "patches" / "sequence_data")


def unpacked() -> list:
    folder = os.environ.get("VLLM_SPEEDUPS_RELEASES")
    found = [root for root in Path(folder).iterdir() if (root / "vllm").is_dir()] if folder else []
    return sorted((root for root in found if CONTRACT.meant_for(root.name)), key=lambda root: Version(root.name))


def loaded(root: Path) -> types.ModuleType:
    """The release's module, under its own name, with what it can import."""
    module = types.ModuleType("vllm.sequence")
    sys.modules["vllm.sequence"] = vllm.sequence = module
    execute(root, "vllm/sequence.py", module)
    return module


def execute(root: Path, file: str, module: types.ModuleType) -> None:
    body = []
    for node in ast.parse((root / file).read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("vllm"):
            for name in node.names:
                setattr(module, name.asname or name.name, found(root, node.module, name.name))
        else:
            body.append(node)
    exec(compile(ast.Module(body, []), str(root / file), "exec"), vars(module))


def found(root: Path, module: str, name: str) -> object:
    """What a release imports: from this environment, or else, for the inputs of a sequence, from the release."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        if module != "vllm.inputs" or not (root / "vllm/inputs/data.py").exists():
            return typing.Any
    inputs = types.ModuleType("vllm.inputs.data")
    execute(root, "vllm/inputs/data.py", inputs)
    return getattr(inputs, name, typing.Any)


@pytest.fixture
def release(request, monkeypatch):
    """The release's module in vLLM's place, with the patch built for it and bound."""
    before, root = sys.modules["vllm.sequence"], request.param
    monkeypatch.delitem(sys.modules, "test_sequence_data", raising=False)
    module = loaded(root)
    source = Tree(root)
    form = CONTRACT.match({path: source.fingerprint(path) for path in CONTRACT.paths()})
    kind = module.Sequence
    stock = {
        glue.CLASS: module.SequenceData, glue.TARGET: kind.hash_of_block, glue.NUM_HASHED: kind.num_hashed_tokens_of_block,
    }  # fmt: skip

    def failed(error):
        raise AssertionError("the patch failed") from error

    context = Context(form.name, stock, failed)
    # Imported while stock's class is bound, which these tests take for stock.
    tests = importlib.import_module("test_sequence_data")
    made = glue.build(context)
    module.SequenceData, kind.hash_of_block = made[glue.CLASS], made[glue.TARGET]
    glue.probe(context, made)
    yield tests
    sys.modules["vllm.sequence"] = vllm.sequence = before


@pytest.mark.parametrize("release", unpacked(), indirect=True, ids=lambda root: root.name)
def test_the_release_is_matched_in_all_that_the_other_tests_look_at(release):
    release.test_both_classes_answer_alike_whatever_is_done_to_them(None)
    release.test_every_block_has_the_hash_that_stock_gives_it(None)
    release.test_a_prompt_that_is_replaced_is_hashed_anew(None)
    release.test_a_prompt_is_hashed_once_for_all_of_its_blocks_and_forks(None)
    release.test_forks_grow_apart(None)
    release.test_prefixes_are_directly_hashable(None)
    if release.STRUCT:
        wire = release.TestOnTheWire()
        wire.test_both_classes_write_the_same_bytes_and_read_each_others(None)
        wire.test_equality_is_that_of_the_fields(None)
        wire.test_the_outputs_read_are_those_in_the_array(None)
        for test in (wire.test_from_seqs_makes_ours, wire.test_prompt_embeddings_are_stocks):
            with contextlib.suppress(pytest.skip.Exception):
                test(None)
