"""Which form of a patch the installed vLLM has."""

from __future__ import annotations

from vllm_speedups.patching import Declined
from vllm_speedups.plugin import discover


def matched(name: str) -> str:
    """The name of the form that the installed vLLM matches, empty where it matches none."""
    patch = next(patch for patch in discover() if patch.name == name)
    try:
        patch.check()
    except Declined:
        return ""
    return patch.form.name
