"""An engine process in which something of ours breaks: `python faulty.py FAULT ENGINE_ARGUMENTS`, then as the worker.

Every fault is put into the libraries under the patches before vLLM starts; what vLLM runs is otherwise as always. What
is corrupted is corrupted for the model's vocabulary and prompts only: the probes, whose own are small, would notice at once.
"""

from __future__ import annotations

import functools
import os
import sys


def corrupt_rows() -> None:
    """Every tenth row that is remembered allows one token more and one token less."""
    from vllm_speedups.masks import rows

    put, calls = rows.GrammarRows.put, [0]

    def corrupted(self, state, row):
        calls[0] += len(row) > 1000
        if calls[0] % 10 == 9:
            row = row.copy()
            row[calls[0] % len(row)] ^= 0x00FFFF00
        return put(self, state, row)

    rows.GrammarRows.put = corrupted


def corrupt_masks() -> None:
    """Every device mask loses a token, or gets one."""
    from vllm_speedups.masks import device, interning

    build = device.build

    def corrupted(row, vocab_size, quick=False):
        if len(row) > 1000:
            row = row.copy()
            row[7] ^= 1
        return build(row, vocab_size, quick)

    interning.device.build = corrupted


def flip_digests() -> None:
    """Every digest that is found again, beside those of the probe's long prompt, has a bit flipped."""
    from vllm_speedups.prefix.memo import PrefixMemo

    find = PrefixMemo.find

    def flipped(self, key, data, begin, block_size, blocks):
        digests = find(self, key, data, begin, block_size, blocks)
        probed = self.budget < 2**22
        return digests if probed else [bytes([digest[0] ^ 1]) + digest[1:] for digest in digests]

    PrefixMemo.find = flipped


def fail(kind: type) -> None:
    """Every third call of the libraries raises."""
    from vllm_speedups.masks.apply import MaskApplier
    from vllm_speedups.masks.rows import GrammarRows
    from vllm_speedups.masks.tracking import Request
    from vllm_speedups.prefix.hasher import PrefixHasher

    def failing(function):
        calls = [0]

        @functools.wraps(function)
        def call(*args, **kwargs):
            calls[0] += 1
            if calls[0] % 3 == 0:
                raise kind("a fault")
            return function(*args, **kwargs)

        return call

    for owner, name in (
        (MaskApplier, "apply"),
        (GrammarRows, "put"),
        (Request, "look_up"),
        (Request, "filled"),
        (PrefixHasher, "extend"),
    ):
        setattr(owner, name, failing(getattr(owner, name)))


def kill_threads() -> None:
    """The thread that builds networks ends as it begins to work, every time; so does the one that reports."""
    from vllm_speedups import reporter
    from vllm_speedups.masks.tracking import Tracker

    def end(self, *_):
        print("a thread was ended", file=sys.stderr)
        raise SystemExit

    Tracker._work = end
    reporter.Reporter._wait = end


FAULTS = {
    "corrupt rows": corrupt_rows,
    "corrupt masks": corrupt_masks,
    "flip digests": flip_digests,
    "raise": lambda: fail(RuntimeError),
    "exhaust memory": lambda: fail(MemoryError),
    "kill threads": kill_threads,
}

if __name__ == "__main__":
    FAULTS[os.environ["FAULT"]]()
    from vllm_speedups.bench import worker

    worker.main()
