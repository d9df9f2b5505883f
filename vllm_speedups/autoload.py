"""Loading where vLLM has no plugin system, before 0.5.5: what autowrapt calls when `vllm` has been imported.

autowrapt imports this module as Python starts, in every process that AUTOWRAPT_BOOTSTRAP=vllm_speedups reaches: it imports
nothing until there is a vLLM.
"""

from __future__ import annotations

from importlib.util import find_spec


def vllm_imported(module: object) -> None:
    """Apply the patches, once vLLM is imported. A vLLM with a plugin system loads the plugin itself."""
    if find_spec("vllm.plugins") is None:
        from .plugin import register

        register()
