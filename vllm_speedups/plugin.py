"""The vllm.general_plugins entry point: applies the patches that fit, once a process, and reports in one line."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from pathlib import Path

import wrapt

from . import __version__, settings, telemetry
from .metrics import Collector
from .patching import DECLINED, DISABLED, Patch, Verification, apply, load
from .reporter import Reporter
from .status import line

logger = logging.getLogger("vllm.speedups")

_lock = threading.Lock()
_patches: list | None = None


class PatchNotApplied(RuntimeError):
    """Raised at load under VLLM_SPEEDUPS_STRICT=1 when a patch meant for this engine was not applied."""


def discover() -> list:
    """One Patch for every folder under `patches/`, by name. Raises ContractError for one that cannot be read."""
    from . import patches

    found = []
    for place in patches.__path__:
        for file in sorted(Path(place).glob("*/patch.toml")):
            contract = load(file.parent)
            found.append(Patch(contract, glue=f"{patches.__name__}.{file.parent.name}"))
    return found


def register() -> None:
    """What vLLM calls in each of its processes, as often as it likes. Raises only under VLLM_SPEEDUPS_STRICT=1."""
    # Syntax trees are many objects: they would set off a full collection of all that vLLM has imported (300 ms).
    collects = gc.isenabled()
    gc.disable()
    try:
        declined = _register()
    except Exception:
        if settings.current().strict:
            raise
        logger.exception("vllm-speedups: could not start, vLLM runs stock")
        return
    finally:
        if collects:
            gc.enable()
    if declined and settings.current().strict:
        reasons = "; ".join(f"{patch.name}: {patch.reason}" for patch in declined)
        raise PatchNotApplied(f"{settings.STRICT}=1 and not applied: {reasons}")


def _register() -> list:
    """Apply on the first call. Returns the patches meant for this engine that declined."""
    global _patches
    with _lock:
        if _patches is None:
            _declare_variables()
            chosen = settings.current()
            patches = discover()
            for warning in chosen.unknown({patch.name for patch in patches}):
                logger.warning("%s", warning)
            verification = Verification(chosen.verify, chosen.verify_dump)
            apply(patches, vllm_version(), chosen.disables, eager=chosen.strict, verification=verification)
            _patches = patches
            _inform(summary(patches))
            _report(chosen)
        else:
            for patch in _patches:
                patch.look_again()
        return [patch for patch in _patches if patch.status == DECLINED]


def patches() -> list:
    """The patches of this process, empty before `register` ran."""
    return list(_patches or ())


def revert() -> None:
    """Restore stock vLLM in this process. Patches that wait for an import are called off."""
    for patch in patches():
        if patch.active:
            patch.revert()


def state() -> dict:
    """What the patches are and did in this process, as `vllm-speedups status` shows it. Plain JSON."""
    counted = telemetry.snapshot()
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "vllm_speedups": __version__,
        "vllm": vllm_version(),
        "patches": [
            {
                "name": patch.name,
                "status": patch.status,
                "reason": patch.reason,
                "failures": patch.failures,
                "verified": patch.verified,
                "differences": patch.differences,
                "counters": counted.get(patch.name, {}),
            }
            for patch in patches()
        ],
    }


def _report(chosen: settings.Settings) -> None:
    """Let the process be asked: by `vllm-speedups status`, by Prometheus, and by whoever reads its log."""
    Reporter(state, line, chosen.status, chosen.log_minutes).start()
    if chosen.status:
        wrapt.register_post_import_hook(
            lambda module: module.REGISTRY.register(Collector(state)), "prometheus_client.registry"
        )


def vllm_version() -> str | None:
    """The version that the imported vLLM says it is, or None."""
    module = sys.modules.get("vllm.version") or sys.modules.get("vllm")
    return getattr(module, "__version__", None)


def summary(patches: list) -> str:
    """The one line about what was applied and what was not, and why."""
    parts = [f"applied {', '.join(patch.name for patch in patches if patch.active) or 'nothing'}"]
    for patch in patches:
        # What waits to be asked for is news to nobody: `doctor` lists it.
        if patch.status == DECLINED or (patch.status == DISABLED and not patch.contract.off_by_default):
            parts.append(f"{patch.name} {patch.status}: {patch.reason}")
    return f"vllm-speedups {__version__} on vLLM {vllm_version() or '(unknown version)'}: {' | '.join(parts)}"


def _inform(text: str) -> None:
    """Log at INFO, also where vLLM loads plugins before it configures its logging (`LLM(...)` since 0.32)."""
    if logger.hasHandlers() or os.environ.get("VLLM_CONFIGURE_LOGGING", "1") == "0":
        logger.info("%s", text)
        return
    level = logging.getLevelName(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    if isinstance(level, int) and level <= logging.INFO:
        # The stream and the shape of vLLM's own lines, for this one line.
        stream = sys.stderr if "stderr" in os.environ.get("VLLM_LOGGING_STREAM", "") else sys.stdout
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [plugin.py] %(message)s", "%m-%d %H:%M:%S"))
        handler.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))


def _declare_variables() -> None:
    """Make our variables known to vLLM, which warns about, or rejects, unknown ones that begin with VLLM_.

    Only those that are set, and always as None: vLLM hashes all variables that it knows into the key of its compile
    cache, and a setting of ours must not throw that cache away.
    """
    known = getattr(sys.modules.get("vllm.envs"), "environment_variables", None)
    if known is None:
        return
    for name in settings.VARIABLES:
        if name in os.environ and name not in known:
            known[name] = _nothing


def _nothing() -> None:
    return None


__all__ = ["PatchNotApplied", "discover", "patches", "register", "revert", "summary", "vllm_version"]
