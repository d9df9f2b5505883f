"""`bench mask --device cuda` from end to end where there is no such device: the CPU stands for it, kernels are interpreted.

It shows that the program runs and compares what it should; its times mean nothing here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("xgrammar") is None, reason="Triton or xgrammar is not installed"
)

# What cannot exist here: the device, its streams and events, pinned memory.
PRETEND = """
import sys
from types import SimpleNamespace
import torch

class Event:
    def __init__(self, enable_timing=False):
        pass
    def record(self, stream=None):
        pass
    def query(self):
        return True
    def synchronize(self):
        pass
    def elapsed_time(self, other):
        return 0.5

def unpinned(function):
    def made(*arguments, pin_memory=False, **more):
        return function(*arguments, **more)
    return made

cpu = torch.device("cpu")
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_name = lambda: "a pretended GPU"
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=3, gcnArchName="")
torch.cuda.synchronize = lambda: None
torch.cuda._sleep = lambda cycles: None
torch.cuda.current_stream = lambda device=None: "the stream"
torch.cuda.Event = Event
torch.empty, torch.full = unpinned(torch.empty), unpinned(torch.full)

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Bare())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "vllm" else find(name)

from vllm_speedups.bench import mask, mask_cuda
mask_cuda._the_device = lambda: cpu
sys.exit(mask.main(sys.argv[1:]))
"""


def test_it_runs_and_the_logits_are_equal(tmp_path):
    file = tmp_path / "cuda.json"
    words = ["--device", "cuda", "--rows", "4", "--vocab", "300", "--repeat", "2", "--json", str(file)]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PRETEND, *words], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(file.read_text())
    assert report["machine"]["device"] == "a pretended GPU" and "xgrammar's Triton kernel" in report["stock"]
    assert {(row["dtype"], row["new"]) for row in report["rows"]} == {
        (dtype, new) for dtype in ("float32", "bfloat16") for new in (0, 2, 4)
    }
    for row in report["rows"]:
        assert row["equal"]
        # Ten words a row; a packet has four slots and four targets, and two words more for each new row's slot.
        assert row["stock"]["bytes"] == 4 * 10 * 4
        assert row["resident"]["bytes"] == 32 + 4 * (10 + 2) * row["new"]
    assert "a pretended GPU" in done.stdout and "us a step" in done.stdout
