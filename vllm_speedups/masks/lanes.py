"""Lanes: what a device is asked to do, in the order in which it does it. One for the CPU, one for a CUDA stream.

Everything that `resident` gives a device goes through a lane, and a lane is a single queue: what is asked for later
happens later. docs/cuda-masks.md argues from that.
"""

from __future__ import annotations

import torch


class Lane:
    """The CPU, which does everything at once."""

    def enter(self, held: list) -> None:
        """Begin a step, in which `held` tensors of this lane are used."""

    def leave(self) -> None:
        """End it."""

    def staging(self, words: int) -> torch.Tensor:
        """Host memory that `upload` reads: int32 [words]."""
        return torch.empty(words, dtype=torch.int32)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source`, part of a staging buffer, to the device. It may be read until the next event has passed."""
        target.copy_(source)

    def launch(self, function, *arguments) -> None:
        """Run `function` on the device. It may be asked for now and happen later."""
        function(*arguments)

    def event(self):
        """An event that has passed; `record` makes it one that passes when all that was asked for so far is done."""
        return _Passed()

    def record(self, event) -> None:
        """Move the event behind everything that was asked for so far."""


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CudaLane(Lane):
    """The stream that is current when a step begins. A step on another stream waits for the one before."""

    def __init__(self, device: torch.device):
        self._stream = None
        self._done = torch.cuda.Event()
        self._device = device

    def enter(self, held: list) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_event(self._done)
            for tensor in held:
                # Should they be freed, their memory is not handed out before this stream is through with them.
                tensor.record_stream(stream)
        self._stream = stream

    def leave(self) -> None:
        self._done.record(self._stream)

    def staging(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int32, pin_memory=True)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self):
        return torch.cuda.Event()

    def record(self, event) -> None:
        event.record(self._stream)
