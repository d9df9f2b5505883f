"""`bench mask`: it runs from a bare checkout, and says in one line what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xgrammar")
ROOT = Path(__file__).parents[2]

# What a bare machine lacks: vLLM, and what this package asks for that torch and xgrammar do not.
BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
from vllm_speedups.bench.mask import main
sys.exit(main({words!r}))
"""
BLOCKED = {"vllm", "wrapt", "importlib_metadata", "tomli"}


def run(*words: str, blocked: set = BLOCKED) -> subprocess.CompletedProcess:
    code = BARE.replace("{blocked!r}", repr(blocked)).replace("{words!r}", repr(list(words)))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_it_runs_from_a_bare_checkout(tmp_path):
    file = tmp_path / "mask.json"
    done = run("--rows", "4", "--vocab", "3200", "--repeat", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(file.read_text())
    assert report["stock"] == "xgrammar's kernel" and all(row["equal"] for row in report["rows"])
    assert {row["dtype"] for row in report["rows"]} == {"float32", "bfloat16"}
    assert "4 rows of 3,200 logits, ms, medians of 2" in done.stdout and done.stdout.count("all alike") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_in_one_line():
    done = run("--device", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["bench mask --device cuda: torch finds no CUDA device here"]


@pytest.mark.parametrize("words", [["--device", "tpu"], ["--dtypes", "float64"], ["--rows", "0"]])
def test_options_that_make_no_sense_are_one_line(words):
    done = run(*words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "--device is cpu or cuda" in done.stderr


def test_without_stock_s_kernel_it_compares_with_torch_and_says_so():
    done = run("--rows", "2", "--vocab", "320", "--repeat", "2", blocked={*BLOCKED, "xgrammar"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "stock is torch's masked_fill_, since neither vLLM nor xgrammar can be imported" in done.stdout


def test_without_torch_it_says_so_in_one_line():
    done = run(blocked={*BLOCKED, "torch"})
    assert done.returncode == 2 and done.stderr.splitlines() == [
        "bench mask needs torch and NumPy: No module named 'torch'"
    ]
