"""`bench mask --device cuda`: a step's masks on CUDA logits, stock's staging and kernel beside resident masks.

Needs torch, Triton and xgrammar's Triton kernel, of which an unpacked wheel is enough; vLLM's own function is used where vLLM
is installed, else what it does is done here with that kernel. Told apart, for 0, 2 and all rows of a step being new:

    host    until the call returns, the device idle before it
    device  between two events around the call, the host ahead of the device
    wall    from the call until the device is done, the device idle before it
    bytes   from host to device
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from . import report as reports
from .mask import VLLMS, bits, installed

# Tokens allowed in each row, as they are or counted from the vocabulary's end.
ALLOWED = (100, 75_000, -2_000)
# Clock cycles that the device is kept busy for while the host gets ahead of it: some milliseconds.
_AHEAD = 10_000_000


class Missing(RuntimeError):
    """Raised where a part is missing, with the line for the user."""


def run(options) -> int:
    """Measure and print. 0: all logits equal stock's; 1: some differ; 2: a part or the device is missing."""
    try:
        stock, name = _stock()
    except Missing as error:
        print(f"bench mask --device cuda: {error}", file=sys.stderr)
        return 2
    import torch

    rows = []
    for dtype in options.dtypes:
        for allowed in ALLOWED:
            allowed = allowed if allowed > 0 else options.vocab + allowed
            if 0 < allowed <= options.vocab:
                for new in sorted({0, min(2, options.rows), options.rows}):
                    rows.append(_measure(stock, options, dtype, allowed, new))
                    reports.say(_line(rows[-1]))
    report = reports.make("mask", options, stock=name, rows=rows)
    report["machine"]["device"] = torch.cuda.get_device_name()
    reports.finish(options, report, table)
    return 0 if all(row["equal"] for row in rows) else 1


def _stock() -> tuple:
    """What applies rows (int32 array [n, words]) to all logits [n, vocab] as stock does, and its name. Raises Missing."""
    try:
        import torch
    except ImportError as error:
        raise Missing(f"torch is needed: {error}") from None
    if not torch.cuda.is_available():
        raise Missing("torch finds no CUDA device here")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise Missing(f"Triton is needed: {error}") from None
    if importlib.util.find_spec("vllm") is not None and (found := installed())[1] == VLLMS:
        return found
    kernel = _xgrammar_kernel()

    def staged(logits, rows) -> None:
        staging = torch.full((len(logits), rows.shape[1]), -1, dtype=torch.int32, pin_memory=True)
        array = staging.numpy()
        for index, row in enumerate(rows):
            array[index] = row
        kernel(logits, staging.to(logits.device, non_blocking=True))

    return staged, "xgrammar's Triton kernel, rows staged as vLLM does"


def _xgrammar_kernel():
    """xgrammar's Triton kernel from its own file: the package asks for more than a bare machine has."""
    spec = importlib.util.find_spec("xgrammar")
    folders = spec.submodule_search_locations if spec else ()
    files = [Path(folder, "kernels", "apply_token_bitmask_inplace_triton.py") for folder in folders or ()]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise Missing("xgrammar's Triton kernel is needed: unpack an xgrammar wheel into a folder on PYTHONPATH")
    loaded = importlib.util.spec_from_file_location("xgrammar_triton_kernel", file)
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    return module.apply_token_bitmask_inplace_triton


def _measure(stock, options, dtype: str, allowed: int, new: int) -> dict:
    import numpy as np
    import torch

    from ..masks.cuda import _resident
    from ..masks.packed import pack

    random, device = np.random.default_rng(0), _the_device()
    known = np.stack([pack(random.permutation(options.vocab) < allowed) for _ in range(options.rows)])
    logits = torch.randn(options.rows, options.vocab, device=device).to(getattr(torch, dtype))
    counters: dict = defaultdict(int)
    resident = _resident(device, known.shape[1], 64 * 2**20, counters)
    targets = range(options.rows)

    def step(number: int):
        rows = known.copy()
        # Rows that no step has brought before, about as dense.
        rows[:new, 0] = random.integers(-(2**31), 2**31, new)
        rows[:new, -1] = number
        return rows

    def ours(batch, rows) -> None:
        if not resident.apply(batch, rows, targets):
            raise RuntimeError("resident masks did not serve the step")

    sides, times, equal = {"stock": stock, "resident": ours}, defaultdict(list), True
    for number in range(options.repeat + 3):
        # Two steps, each with new rows of its own: one is timed on the host, one on the device.
        steps, ends = (step(2 * number), step(2 * number + 1)), []
        for side, function in sides.items():
            batch, sent = logits.clone(), counters["bytes sent"]
            found = _host(function, batch, steps[0])
            ends.append(batch)
            sent = counters["bytes sent"] - sent
            found.update(_device(function, logits.clone(), steps[1]), bytes=sent or known.nbytes)
            # The first three warm up: kernels are compiled, memory is allocated.
            for name, value in found.items() if number >= 3 else ():
                times[side, name].append(value)
        equal = equal and bool(torch.equal(bits(ends[0]), bits(ends[1])))
    start = time.perf_counter()
    resident.table.intern(known)
    finding = 1e6 * (time.perf_counter() - start)
    names = ("host", "device", "wall", "bytes")
    medians: dict = {side: {name: median(times[side, name]) for name in names} for side in sides}
    medians["resident"]["finding"] = finding
    return {"dtype": dtype, "allowed": allowed, "new": new, "equal": equal, **medians}


def _the_device():
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def _host(function, batch, rows) -> dict:
    """Microseconds on the host, and until the device is done."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    function(batch, rows)
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return {"host": 1e6 * host, "wall": 1e6 * (time.perf_counter() - start)}


def _device(function, batch, rows) -> dict:
    """Microseconds on the device, which has something else to do until the host has asked for everything."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD)
    begin.record()
    function(batch, rows)
    end.record()
    torch.cuda.synchronize()
    return {"device": 1e3 * begin.elapsed_time(end)}


def _line(row: dict) -> str:
    sides = (
        f"{side} host {row[side]['host']:.0f} us, device {row[side]['device']:.0f}" for side in ("stock", "resident")
    )
    return f"  {row['dtype']}, {row['allowed']:,} allowed, {row['new']} new: {', '.join(sides)}"


def table(report: dict) -> str:
    """The report as text, microseconds and bytes a step."""
    options = report["options"]
    lines = [
        reports.heading(report),
        f"{options['rows']} rows of {options['vocab']:,} logits, us a step, medians of {options['repeat']}; "
        f"stock is {report['stock']}; finding: of host, the masks' ids",
        "",
        f"{'dtype':9}{'allowed':>9}{'new':>5} "
        + "".join(f"{name:>10}" for name in ("stock host", " device", "wall", "bytes"))
        + "".join(f"{name:>10}" for name in ("ours host", "finding", "device", "wall", "bytes")),
    ]
    for row in report["rows"]:
        stock, ours = row["stock"], row["resident"]
        cells = [stock[name] for name in ("host", "device", "wall", "bytes")]
        cells += [ours[name] for name in ("host", "finding", "device", "wall", "bytes")]
        differs = "" if row["equal"] else "  DIFFERS"
        lines.append(
            f"{row['dtype']:9}{row['allowed']:9,}{row['new']:5} "
            + "".join(f"{cell:10,.0f}" for cell in cells)
            + differs
        )
    return "\n".join(lines)
