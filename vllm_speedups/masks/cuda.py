"""Masks on CUDA logits: resident masks where everything is as it was when they were written for, else nothing.

Each dtype is proven on the first step that brings it: stock masks the logits, ours masks a copy, and both must end with the
same bits. Whatever is unexpected is left to stock; an error, or a difference, ends it for the process, with one line.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Callable

import numpy as np
import torch

from .device import VIEWS
from .kernels import triton_kernel
from .lanes import CudaLane
from .packed import WORD
from .resident import ResidentMasks

logger = logging.getLogger("vllm.speedups")

# Of the device's memory, which vLLM has dealt out to its last percent: room for 3,500 rows of 150,000 tokens.
DEVICE_MB = 64


class CudaMasks:
    """The resident masks of a process, made on first use. `budget` in bytes is what the caller would spend at most."""

    def __init__(self, budget: int, counters: dict, make: Callable | None = None):
        self._budget = min(budget, DEVICE_MB * 2**20)
        self._counters = counters
        self._make = make
        self._masks: ResidentMasks | None = None
        self._device: torch.device | None = None
        self._proven: set = set()
        self._off = False

    def apply(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        targets: Sequence[int],
        stock: Callable,
        starts=None,
        stride: int = 0,
        differed: Callable | None = None,
    ) -> bool:
        """Mask `logits` as `stock()` would; False, and nothing done, where the caller has to call it.

        Arguments as of `ResidentMasks.apply`. Where `differed` is given this step is compared with stock too, whose bits
        stay in the logits, and a difference is told to it, as facts. Never raises but for what `stock()` raises.
        """
        if self._off or not self._fits(logits, rows, targets, starts, stride):
            return False
        kind = (logits.dtype, stride)
        got = logits
        try:
            if self._masks is None:
                self._masks = (self._make or _resident)(logits.device, rows.shape[1], self._budget, self._counters)
                self._device = logits.device
            if kind not in self._proven or differed is not None:
                got = logits.clone()
            if not self._masks.apply(got, rows, targets, starts, stride):
                return False
        except Exception as error:
            self._end(f"it failed with {error!r}")
            return False
        if got is not logits:
            stock()
            self._compare(kind, got, logits, differed)
        return True

    def _compare(self, kind: tuple, got: torch.Tensor, expected: torch.Tensor, differed: Callable | None) -> None:
        try:
            ours, stocks = (one.view(VIEWS[kind[0]]) for one in (got, expected))
            if torch.equal(ours, stocks):
                self._proven.add(kind)
                return
            self._end(f"it left other logits than stock ({kind[0]})")
            if differed is not None:
                row, column = (ours != stocks).nonzero()[0].tolist()
                bits = {"stock": hex(int(stocks[row, column])), "ours": hex(int(ours[row, column]))}
                differed({"logits": f"{kind[0]} {tuple(got.shape)}", "first that differs": [row, column], **bits})
        except Exception as error:
            self._end(f"it could not be compared with stock: {error!r}")

    def _fits(self, logits: torch.Tensor, rows: np.ndarray, targets: Sequence[int], starts, stride: int) -> bool:
        """Whether everything has the form that the kernel was written for."""
        if not (
            logits.dtype in VIEWS
            and logits.dim() == 2
            and logits.stride(1) == 1
            and rows.dtype == np.int32
            and rows.ndim == 2
            and rows.shape[0] == len(targets)
            and (self._masks is None or (self._device == logits.device and self._masks.words == rows.shape[1]))
        ):
            return False
        if starts is None:
            count = logits.shape[0]
        else:
            # Stock's second kernel is undefined for logits past the rows' last bit.
            if not (
                stride > 0
                and starts.dtype == torch.int32
                and starts.dim() == 1
                and starts.is_contiguous()
                and starts.device == logits.device
                and logits.shape[1] <= rows.shape[1] * WORD
            ):
                return False
            count = (len(starts) - 1) * stride
        return all(0 <= target < count for target in targets) and len(set(targets)) == len(targets)

    def _end(self, why: str) -> None:
        """From now on everything is stock's."""
        self._off = True
        self._masks = None
        logger.warning("vllm-speedups: masks on CUDA are off, vLLM runs stock there: %s", why)


def usable(logits: torch.Tensor) -> bool:
    """Whether logits of a known dtype are on this process's own CUDA device, outside of a graph that is being captured."""
    return (
        logits.is_cuda
        and logits.dtype in VIEWS
        and torch.version.cuda is not None
        and logits.device.index == torch.cuda.current_device()
        and not torch.cuda.is_current_stream_capturing()
    )


def _resident(device: torch.device, words: int, budget: int, counters: dict) -> ResidentMasks:
    return ResidentMasks(CudaLane(device), triton_kernel(), device, words, budget, counters)
