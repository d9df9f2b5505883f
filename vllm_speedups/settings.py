"""Settings: the VLLM_SPEEDUPS_* variables, read once a process, with one clear line for each that makes no sense."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

# A child of vLLM's own logger, so that the user's logging set-up for vLLM covers the plugin.
logger = logging.getLogger("vllm.speedups")

DISABLE = "VLLM_SPEEDUPS_DISABLE"
ENABLE = "VLLM_SPEEDUPS_ENABLE"
STRICT = "VLLM_SPEEDUPS_STRICT"
MASK_CACHE_MB = "VLLM_SPEEDUPS_MASK_CACHE_MB"
ROW_CACHE_MB = "VLLM_SPEEDUPS_ROW_CACHE_MB"
PREFIX_MEMO_MB = "VLLM_SPEEDUPS_PREFIX_MEMO_MB"
VERIFY = "VLLM_SPEEDUPS_VERIFY"
VERIFY_DUMP = "VLLM_SPEEDUPS_VERIFY_DUMP"
STATUS = "VLLM_SPEEDUPS_STATUS"
LOG_MINUTES = "VLLM_SPEEDUPS_LOG_MINUTES"
GUIDE_CACHE_MB = "VLLM_SPEEDUPS_GUIDE_CACHE_MB"
CUDA_MASKS = "VLLM_SPEEDUPS_CUDA_MASKS"
VARIABLES = (
    DISABLE,
    ENABLE,
    STRICT,
    MASK_CACHE_MB,
    ROW_CACHE_MB,
    PREFIX_MEMO_MB,
    VERIFY,
    VERIFY_DUMP,
    STATUS,
    LOG_MINUTES,
    CUDA_MASKS,
    GUIDE_CACHE_MB,
)

# Switched on together with the CUDA form of `grammar-masks`, which is for the other model runner.
WORKER_MASKS = "worker-masks"


@dataclass(frozen=True)
class Settings:
    """What is in force in this process, in the order of VARIABLES. Budgets are in MiB, `verify` is a share."""

    disable: tuple = ()
    enable: tuple = ()
    strict: bool = False
    mask_cache_mb: float = 256
    row_cache_mb: float = 256
    prefix_memo_mb: float = 64
    verify: float = 0
    verify_dump: str | None = None
    status: bool = True
    log_minutes: float = 5
    cuda_masks: bool = False
    guide_cache_mb: float = 512

    def disables(self, patch) -> str:
        """Why a patch, anything with `name` and `off_by_default`, stays off; empty where it does not."""
        if "all" in self.disable or patch.name in self.disable:
            return "switched off by the user"
        if patch.off_by_default and patch.name not in self.enable:
            if patch.name != WORKER_MASKS:
                return f"off by default ({ENABLE}={patch.name} to use it): {patch.off_by_default}"
            if not self.cuda_masks:
                return f"off by default ({CUDA_MASKS}=1 to use it): {patch.off_by_default}"
        return ""

    def unknown(self, known: set) -> list:
        """A line for each variable that names a patch that is not among `known`."""
        lines = []
        for variable, names in ((DISABLE, self.disable), (ENABLE, self.enable)):
            wrong = [name for name in names if name not in known and name != "all"]
            if wrong:
                lines.append(f"{variable} names no known patch: {', '.join(wrong)} (known: {', '.join(sorted(known))})")
        return lines


def read(environ: Mapping[str, str], warn: Callable[[str], None]) -> Settings:
    """Settings from an environment. A value that makes no sense is warned about, once, and the default is used."""

    def number(variable: str, default: float, most: float, what: str) -> float:
        text = environ.get(variable)
        if text is None or not text.strip():
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            warn(f"{variable}={text!r} is not {what}: the default, {default:g}, is used")
            return default
        return value

    def budget(variable: str, default: float) -> float:
        # In bytes it must be finite too.
        return number(variable, default, sys.float_info.max / 2**20, "a number of MiB, 0 or more")

    def names(variable: str) -> tuple:
        return tuple(name for name in environ.get(variable, "").replace(" ", "").split(",") if name)

    def switch(variable: str, default: bool = False) -> bool:
        text = environ.get(variable, "").strip().lower()
        if text == "":
            return default
        if text in ("0", "false", "no", "off"):
            return False
        if text not in ("1", "true", "yes", "on"):
            warn(f"{variable}={environ[variable]!r} is neither 0 nor 1: it counts as {default:d}")
            return default
        return True

    return Settings(
        disable=names(DISABLE),
        enable=names(ENABLE),
        strict=switch(STRICT),
        mask_cache_mb=budget(MASK_CACHE_MB, Settings.mask_cache_mb),
        row_cache_mb=budget(ROW_CACHE_MB, Settings.row_cache_mb),
        prefix_memo_mb=budget(PREFIX_MEMO_MB, Settings.prefix_memo_mb),
        verify=number(VERIFY, Settings.verify, 1, "a share between 0 and 1"),
        verify_dump=environ.get(VERIFY_DUMP, "").strip() or None,
        status=switch(STATUS, Settings.status),
        log_minutes=number(LOG_MINUTES, Settings.log_minutes, 1e6, "a number of minutes, 0 or more"),
        cuda_masks=switch(CUDA_MASKS),
        guide_cache_mb=budget(GUIDE_CACHE_MB, Settings.guide_cache_mb),
    )


_current: Settings | None = None


def current() -> Settings:
    """The settings of this process, read on first use."""
    global _current
    if _current is None:
        _current = read(os.environ, logger.warning)
    return _current
