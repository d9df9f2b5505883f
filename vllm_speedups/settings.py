"""Settings: the VLLM_SPEEDUPS_* variables, read once a process, with one clear line for each that makes no sense."""

from __future__ import annotations

import logging
import os
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
GUIDE_CACHE_MB = "VLLM_SPEEDUPS_GUIDE_CACHE_MB"
VARIABLES = (DISABLE, ENABLE, STRICT, MASK_CACHE_MB, ROW_CACHE_MB, PREFIX_MEMO_MB, GUIDE_CACHE_MB)


@dataclass(frozen=True)
class Settings:
    """What is in force in this process. Budgets are in MiB."""

    disable: tuple = ()
    enable: tuple = ()
    strict: bool = False
    mask_cache_mb: float = 256
    row_cache_mb: float = 256
    prefix_memo_mb: float = 64
    guide_cache_mb: float = 512

    def disables(self, patch) -> str:
        """Why a patch, anything with `name` and `off_by_default`, stays off; empty where it does not."""
        if "all" in self.disable or patch.name in self.disable:
            return "switched off by the user"
        if patch.off_by_default and patch.name not in self.enable:
            return f"off by default ({ENABLE}={patch.name} to use it): {patch.off_by_default}"
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

    def budget(variable: str, default: float) -> float:
        text = environ.get(variable)
        if text is None or not text.strip():
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        # In bytes it must be finite too.
        if not 0 <= value * 2**20 < float("inf"):
            warn(f"{variable}={text!r} is not a number of MiB, 0 or more: the default, {default:g}, is used")
            return default
        return value

    def names(variable: str) -> tuple:
        return tuple(name for name in environ.get(variable, "").replace(" ", "").split(",") if name)

    def switch(variable: str) -> bool:
        text = environ.get(variable, "").strip().lower()
        if text in ("", "0", "false", "no", "off"):
            return False
        if text not in ("1", "true", "yes", "on"):
            warn(f"{variable}={environ[variable]!r} is neither 0 nor 1: it counts as 0")
            return False
        return True

    return Settings(
        disable=names(DISABLE),
        enable=names(ENABLE),
        strict=switch(STRICT),
        mask_cache_mb=budget(MASK_CACHE_MB, Settings.mask_cache_mb),
        row_cache_mb=budget(ROW_CACHE_MB, Settings.row_cache_mb),
        prefix_memo_mb=budget(PREFIX_MEMO_MB, Settings.prefix_memo_mb),
        guide_cache_mb=budget(GUIDE_CACHE_MB, Settings.guide_cache_mb),
    )


_current: Settings | None = None


def current() -> Settings:
    """The settings of this process, read on first use."""
    global _current
    if _current is None:
        _current = read(os.environ, logger.warning)
    return _current
