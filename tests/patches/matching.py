"""Which form of a patch the installed vLLM has."""

from __future__ import annotations

from vllm_speedups.plugin import discover


def matched(name: str) -> str:
    """The name of the form that the installed vLLM matches. Raises Declined where it matches none."""
    patch = next(patch for patch in discover() if patch.name == name)
    patch.check()
    return patch.form.name
