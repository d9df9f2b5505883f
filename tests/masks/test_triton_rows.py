"""The Triton kernel, interpreted on the CPU, beside the same in plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# In a process of its own: Triton decides when a kernel is defined whether it is interpreted.
COMPARE = """
import numpy as np, torch
import plain
from vllm_speedups.masks.kernels import mask_rows, triton_kernel
from vllm_speedups.masks import triton_rows

random, launch = np.random.default_rng(0), triton_kernel()
triton_rows.STRETCH = 64
for case in range(24):
    words = int(random.integers(1, 7))
    vocab_size = int(random.integers(1, words * 32 + 1))
    width = vocab_size + int(random.integers(0, 30))
    pool = torch.from_numpy(np.stack([plain.row(random, words, share) for share in (0, 0.01, 0.5, 0.99, 1)]))
    whole = plain.logits(random, 9, width + 5, plain.DTYPES[case % 3])
    count = int(random.integers(1, 7))
    slots = torch.from_numpy(random.integers(0, 5, count).astype(np.int32))
    if case % 2:
        starts, stride = None, 0
        targets = random.permutation(9)[:count]
    else:
        # Three requests of up to three logits; positions past their last are for nobody.
        starts, stride = torch.tensor([0, 2, 3, 6], dtype=torch.int32), 3
        targets = random.permutation(9)[:count]
    targets = torch.from_numpy(targets.astype(np.int32))
    expected = whole.clone()
    mask_rows(expected[:, :width], pool, slots, targets, starts, stride, vocab_size)
    launch(whole[:, :width], pool, slots, targets, starts, stride, vocab_size)
    assert plain.bits(whole) == plain.bits(expected), case
print("compared", case + 1)
"""


def test_the_kernel_masks_as_plain_torch_does():
    paths = [os.path.dirname(__file__), *filter(None, sys.path)]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["compared", "24"]
