"""`worker-masks` beside vLLM's own second runner: its method and its kernel, interpreted, where there is no CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# In a process of its own: vLLM and Triton decide when they are imported what a kernel is. What cannot exist here is put on:
# streams, which are one, and pinned memory, which is memory.
COMPARE = """
import contextlib
from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl

class Stream:
    def wait_stream(self, other):
        pass

torch.cuda.Stream = torch.cuda.current_stream = Stream
torch.cuda.stream = lambda stream: contextlib.nullcontext()

# Triton 3.9 interprets `scalar & block` of booleans as integers, and then refuses them as a mask.
from triton.runtime.interpreter import InterpreterBuilder
masked_store = InterpreterBuilder.create_masked_store

def create_masked_store(self, pointers, value, mask, *more):
    mask.data = mask.data.astype(bool)
    return masked_store(self, pointers, value, mask, *more)

InterpreterBuilder.create_masked_store = create_masked_store

import vllm.triton_utils
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl
import vllm.utils.torch_utils as torch_utils
torch_utils.is_pin_memory_available = lambda: False
torch_utils.PIN_MEMORY = False
from vllm.v1.worker.gpu import structured_outputs as module
module.PIN_MEMORY = False
if hasattr(module, "GRAMMAR_BITMASK_BLOCK_SIZE"):
    module.GRAMMAR_BITMASK_BLOCK_SIZE = 1024

import plain
from matching import matched
from vllm_speedups.masks import cuda
from vllm_speedups.masks.kernels import triton_kernel
from vllm_speedups.masks.lanes import Lane
from vllm_speedups.masks.resident import ResidentMasks
from vllm_speedups.patches import worker_masks as glue
from vllm_speedups.patching import Context

glue.usable = lambda logits: True
cuda._resident = lambda device, *more: ResidentMasks(Lane(), triton_kernel(), device, *more)

form, failures, asked, served = matched("worker-masks"), [], [], []
stock = module.StructuredOutputsWorker.apply_grammar_bitmask

def counted(*arguments):
    asked.append(case)
    return stock(*arguments)

originals = {glue.TARGET: counted}
if form != glue.STRIDED:
    originals[glue.MODULE + ":_build_grammar_mapping"] = module._build_grammar_mapping
context = Context(form, originals, failures.append)
replacements = glue.build(context)
glue.probe(context, replacements)
ours = replacements[glue.TARGET]

vocab_size, stride, device = 70, 3, torch.device("cpu")
more = {} if form == glue.STRIDED else {"num_bonus_tokens": 1}
worker = module.StructuredOutputsWorker(64, vocab_size, device, stride, **more)
random = np.random.default_rng(0)
known = [plain.row(random, 3, share) for share in (0, 0.1, 0.5, 0.9, 1)]
for case in range(30):
    names = [f"r{number}" for number in range(int(random.integers(1, 6)))]
    drafts = random.integers(0, stride, len(names)).astype(np.int32)
    # What the device keeps may be fewer than the drafts that were scheduled.
    kept = np.minimum(drafts, random.integers(0, stride, len(names)))
    starts = np.concatenate([[0], np.cumsum(1 + kept)]).astype(np.int32)
    batch = SimpleNamespace(
        req_ids=names,
        cu_num_logits=torch.from_numpy(starts),
        cu_num_logits_np=np.concatenate([[0], np.cumsum(1 + drafts)]).astype(np.int32),
        num_draft_tokens_per_req=drafts if case % 3 else None,
    )
    guided = [str(name) for name in random.permutation(names)[: int(random.integers(0, len(names) + 1))]]
    if form == glue.STRIDED:
        count = stride * len(guided)
    else:
        count = sum(1 + int(drafts[names.index(name)]) for name in guided)
    rows = np.array([known[index] for index in random.integers(0, len(known), count)], dtype=np.int32).reshape(count, 3)
    logits = plain.logits(random, int(starts[-1]), vocab_size, plain.DTYPES[case % 3])
    expected = logits.clone()
    stock(worker, expected, batch, guided, rows)
    ours(worker, logits, batch, guided, rows)
    assert plain.bits(logits) == plain.bits(expected), case
    if guided:
        served.append(case)
assert not failures, failures
# Without guided requests there is nothing to serve; the first step of each dtype is stock's too.
assert set(asked) & set(served) == {next(one for one in served if one % 3 == kind) for kind in range(3)}, (asked, served)
print("compared", case + 1)
"""


def test_logits_end_as_stock_leaves_them():
    here = os.path.dirname(__file__)
    paths = [here, os.path.join(os.path.dirname(here), "masks"), *filter(None, sys.path)]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["compared", "30"]
