"""The environment holds what the other tests here run: a release's own Python code, and this checkout."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import vllm_speedups


@pytest.mark.parametrize(
    "module",
    ["vllm.sequence", "vllm.core.scheduler", "vllm.core.block.prefix_caching_block", "vllm.model_executor.guided_decoding"],
)
def test_the_layers_that_the_patches_touch_can_be_imported(module):
    assert importlib.import_module(module)


def test_the_plugin_comes_from_this_checkout():
    assert Path(vllm_speedups.__file__).parents[1] == Path(__file__).parents[2]
