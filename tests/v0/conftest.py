"""The tests in this folder run on V0 releases, in environments of their own (make test-v0); elsewhere none is collected."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.version import Version


def _installed() -> Version | None:
    try:
        return Version(importlib.metadata.version("vllm"))
    except importlib.metadata.PackageNotFoundError:
        return None


VLLM = _installed()
# 0.10.2 was the last release with this engine.
collect_ignore_glob = [] if VLLM is not None and Version("0.11") > VLLM else ["*"]


@pytest.fixture
def sequence_data():
    """The patch `sequence-data`, applied for one test."""
    import vllm

    from vllm_speedups.patching import APPLIED, apply
    from vllm_speedups.plugin import discover

    patch = next(patch for patch in discover() if patch.name == "sequence-data")
    apply([patch], vllm.__version__, lambda contract: "", eager=True)
    assert patch.status == APPLIED, patch.reason
    yield patch
    if patch.active:
        patch.revert()
