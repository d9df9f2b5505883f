"""The tests in this folder run on V0 releases, in environments of their own (make test-v0); elsewhere none is collected."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version


def _installed() -> Version | None:
    try:
        return Version(importlib.metadata.version("vllm"))
    except importlib.metadata.PackageNotFoundError:
        return None


VLLM = _installed()
# 0.10.2 was the last release with this engine.
collect_ignore_glob = [] if VLLM is not None and Version("0.11") > VLLM else ["*"]
