"""Where a step's time goes: timers around vLLM's own methods, stock or patched, while one run lasts.

Each stage counts its own time only: what a stage inside of it takes is that stage's.

    forward   `GPUModelRunner.execute_model`: preparing the inputs, the model, the logits
    fill      `StructuredOutputManager.grammar_bitmask`: the grammars' rows for the step
    advance   `accept_tokens` of the grammars, which take in the tokens that were sampled
    transfer  `apply_grammar_bitmask` but for what `apply` takes: placing the rows, staging them, copying them
    apply     the kernel: xgrammar's, the second runner's, or the device masks, finding them included
    sample    the runner's or the sampler's own method: sampling, rejecting drafts
    other     the rest: scheduling, updating requests, output

On an accelerator every stage begins and ends with a synchronisation, which costs the overlap of host and device: that is
why throughput is measured in other runs, without any of this. What runs in other processes (several ranks) is not seen.
"""

from __future__ import annotations

import functools
import sys
import time

STAGES = ("forward", "fill", "advance", "transfer", "apply", "sample", "other")

_RUNNER, _SECOND = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu"
# Stage, module, name. What a release does not have is not timed, and its time is somebody else's. Of `compile_grammar` it is
# the grammars made that are timed, each by itself: from a class whose methods were replaced our patches would keep away.
_TIMED = (
    ("forward", _RUNNER, "GPUModelRunner.execute_model"),
    ("forward", f"{_SECOND}.model_runner", "GPUModelRunner.execute_model"),
    ("fill", "vllm.v1.structured_output", "StructuredOutputManager.grammar_bitmask"),
    ("advance", "vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend.compile_grammar"),
    ("advance", "vllm.v1.structured_output.backend_guidance", "GuidanceBackend.compile_grammar"),
    ("advance", "vllm.v1.structured_output.backend_outlines", "OutlinesBackend.compile_grammar"),
    ("transfer", "vllm.v1.structured_output.utils", "apply_grammar_bitmask"),
    ("transfer", _RUNNER, "apply_grammar_bitmask"),
    ("transfer", _RUNNER, "GPUModelRunner.apply_grammar_bitmask"),
    ("transfer", f"{_SECOND}.structured_outputs", "StructuredOutputsWorker.apply_grammar_bitmask"),
    ("apply", "xgrammar", "apply_token_bitmask_inplace"),
    ("apply", f"{_SECOND}.structured_outputs", "_apply_grammar_bitmask_kernel"),
    ("apply", "vllm_speedups.masks.apply", "MaskApplier.apply"),
    ("apply", "vllm_speedups.masks.resident", "ResidentMasks.apply"),
    ("sample", _RUNNER, "GPUModelRunner._sample"),
    ("sample", f"{_SECOND}.sample.sampler", "Sampler.__call__"),
    ("sample", f"{_SECOND}.spec_decode.rejection_sampler", "RejectionSampler.__call__"),
)


class Stages:
    """Timers in place while the block lasts. `summary()` afterwards."""

    def __init__(self, synchronize=None):
        self._synchronize = synchronize or (lambda: None)
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._steps = 0
        # The time that stages inside of the open ones took, innermost last.
        self._inner: list = []
        self._undo: list = []

    def __enter__(self) -> Stages:
        for stage, module, name in _TIMED:
            owner = sys.modules.get(module)
            *scopes, attribute = name.split(".")
            for scope in scopes:
                owner = getattr(owner, scope, None)
            # What a class inherits is timed where it is defined.
            found = vars(owner).get(attribute) if owner is not None else None
            if found is not None:
                self._undo.append((owner, attribute, found))
                timed = self._making if attribute == "compile_grammar" else self._timed
                setattr(owner, attribute, timed(stage, found))
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self._synchronize()
        self._took = time.perf_counter() - self._began
        while self._undo:
            setattr(*self._undo.pop())

    def summary(self) -> dict:
        """`steps`, and the milliseconds a step of every stage, `other` among them."""
        seconds = {**self._seconds, "other": self._took - sum(self._seconds.values())}
        steps = max(self._steps, 1)
        return {"steps": self._steps, **{stage: 1e3 * seconds[stage] / steps for stage in STAGES}}

    def _making(self, stage: str, compile_grammar):
        @functools.wraps(compile_grammar)
        def making(*args, **kwargs):
            grammar = compile_grammar(*args, **kwargs)
            grammar.accept_tokens = self._timed(stage, grammar.accept_tokens)
            return grammar

        return making

    def _timed(self, stage: str, function):
        if hasattr(function, "__getitem__"):
            return _Kernel(function, lambda launch: self._timed(stage, launch))

        @functools.wraps(function)
        def timed(*args, **kwargs):
            self._synchronize()
            self._steps += stage == "forward"
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._synchronize()
                took = time.perf_counter() - start
                self._seconds[stage] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed


class _Kernel:
    """Stands for a Triton kernel, which is launched as `kernel[grid](...)`."""

    def __init__(self, kernel, timed):
        self._kernel, self._launch = kernel, timed

    def __getitem__(self, grid):
        return self._launch(self._kernel[grid])

    def __getattr__(self, name: str):
        return getattr(self._kernel, name)
