"""Engines for side-by-side runs: each in a process of its own, stock or patched, asked in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable

# The plugin that serves vLLM's entry point, and the variable that decides whether vLLM loads it.
PLUGIN, CHOICE = "vllm_speedups", "VLLM_PLUGINS"
WORKER = ("-m", "vllm_speedups.bench.worker")


class EngineFailed(RuntimeError):
    """Raised when an engine process ends before it answered. Carries the end of what it printed."""


def environment(patched: bool, extra: dict | None = None) -> dict:
    """The environment of an engine process: everything as it is here, but with only our plugin, or none."""
    return {
        **os.environ,
        CHOICE: PLUGIN if patched else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        # A grammar that a busy machine compiles slowly is no failure here.
        "VLLM_REGEX_COMPILATION_TIMEOUT_S": "300",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }


# How vLLM reads the small model of `models.build_model`.
SMALL_MODEL = {
    "tokenizer_mode": "mistral",
    "config_format": "hf",
    "load_format": "dummy",
    "dtype": "float32",
    "enforce_eager": True,
}


def engine_arguments(model: str, backend: str | None = None, small: bool = True, **more) -> dict:
    """Arguments of vLLM's `LLM` for a model, the small one of `models.build_model` or another."""
    arguments = {"model": model, **(SMALL_MODEL if small else {}), "max_model_len": 512, "seed": 0, **more}
    if backend:
        arguments["structured_outputs_config"] = {"backend": backend, **more.get("structured_outputs_config", {})}
    return arguments


class Engine:
    """One engine process. Used as a context manager, it ends with the block."""

    def __init__(self, arguments: dict, patched: bool, extra: dict | None = None, program: Iterable = WORKER):
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, *program, json.dumps(arguments)],
            env=environment(patched, extra),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.patched = patched
        self.backend = arguments.get("structured_outputs_config", {}).get("backend")
        self.about: dict = {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def wait_until_ready(self) -> dict:
        """Block until the engine has started. Raises EngineFailed if it does not."""
        self.about = self.about or self._answer()
        return self.about

    def generate(self, prompts: Iterable, max_tokens: int, **run) -> dict:
        """Run prompts (lists of token ids, or text): `seconds`, `tokens` generated, and `ids` per request and sequence.

        `run` may hold `guide` (arguments of StructuredOutputsParams, or a list of them, None among them, to be dealt out
        in turn), `seed` (that of the first request, the others count on from it), `temperature`, `n`,
        `abort_at_step`, to abort every third request then, `revert_at_step`, to take the plugin back then, and `stages`,
        to be told where the time went (`stages.py`).
        `state` is what the plugin tells of that process (`plugin.state`), `counters` its numbers by patch, `vllm` those
        of vLLM, if it was started with `disable_log_stats=False`. Only `refused` comes back, the reason, where the
        backend does not do the grammar.
        """
        self.wait_until_ready()
        request = {"prompts": list(prompts), "max_tokens": max_tokens, "seed": 0, **run}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def call(self, method: str, **arguments):
        """What a method of vLLM's `LLM` returns, if JSON can carry it."""
        self.wait_until_ready()
        print(json.dumps({"call": method, "arguments": arguments}), file=self._process.stdin, flush=True)
        return self._answer()

    @property
    def pid(self) -> int:
        """The process that runs it, or starts those that do."""
        return self._process.pid

    def output(self) -> str:
        """What the process has printed so far."""
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            tail = "\n".join(self.output().splitlines()[-25:])
            raise EngineFailed(f"the engine process ended with status {self._process.returncode}:\n{tail}")
        return json.loads(line)
