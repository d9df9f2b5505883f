"""`vllm-speedups bench prefix`: what admitting a request costs, stage by stage, with stock's block hasher and ours.

Real requests and vLLM's real KV-cache manager, without a model: hash the prompt, look up its cached blocks, allocate,
free. Both sides take turns, each with a cache of its own, and every digest is compared. Times are the thread's CPU
time: all of this is computing, and other processes on the machine would only add noise.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import statistics
import sys
import time
from typing import Callable

from . import report as reports
from .report import numbers as _numbers

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
STAGES = ("hash", "lookup", "allocate", "free")
SIDES = ("stock", "patched")
VOCAB_SIZE = 131_072
# What a new turn adds behind a prompt that was seen before, in tokens.
NEW_TOKENS = 40
TARGET = "vllm.v1.core.kv_cache_utils:get_request_block_hasher"


class NotPatched(RuntimeError):
    """Raised where the patch is not applied to this vLLM, with the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=_numbers(int),
        default=[1024, 8192, 32_768, 131_072],
        help="prompt lengths (1024,8192,32768,131072)",
    )
    parser.add_argument(
        "--shares",
        type=_numbers(float),
        default=[0.0, 0.5, 0.9, 1.0],
        help=f"shares of the prompt seen before; with 1, {NEW_TOKENS} new tokens follow it (0,0.5,0.9,1)",
    )
    parser.add_argument(
        "--algorithms", type=_numbers(str), default=list(ALGORITHMS), help=",".join(ALGORITHMS) + " (all)"
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (16)")
    parser.add_argument("--repeat", type=int, default=15, help="runs of each side; medians are shown (15)")
    reports.add_arguments(parser, plot=True)


def main(argv: list | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vllm-speedups bench prefix", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Measure and print. 0, or 1 where there is nothing to compare with."""
    from .plots import prefix

    try:
        results = measure(args.algorithms, args.lengths, args.shares, args.block_size, args.repeat)
    except NotPatched as error:
        print(f"bench prefix: {error}", file=sys.stderr)
        return 1
    reports.finish(args, reports.make("prefix", args, **results), table, prefix)
    return 0


def measure(algorithms: list, lengths: list, shares: list, block_size: int, repeats: int) -> dict:
    """Everything, as plain data. Times are medians, in milliseconds. Raises NotPatched."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    factories = _factories()
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    results: dict = {"rows": [], "small": []}
    for name in algorithms:
        function = get_hash_fn_by_name(name)
        init_none_hash(function)
        hashers = {side: factory(block_size, function) for side, factory in factories.items()}
        for length in lengths:
            for share in shares:
                times = _admissions(hashers, length, share, block_size, repeats)
                results["rows"].append({"algorithm": name, "length": length, "share": share, **times})
                reports.say(f"  {name}, {length:,} tokens, {share:.0%} seen before")
        results["small"].append({"algorithm": name, **_small(hashers, block_size)})
    return results


def _factories() -> dict:
    """Both factories of hashers: stock's and the one that is bound in its place. Raises NotPatched."""
    from vllm_speedups import patching, plugin

    plugin.register()
    import vllm.v1.core.kv_cache_utils  # noqa: F401

    patch = next((patch for patch in plugin.patches() if patch.name == "block-hashes"), None)
    if patch is None or patch.status != patching.APPLIED or not patch.prove():
        raise NotPatched(f"block-hashes is {patch.status if patch else 'missing'}: {patch.reason if patch else ''}")
    return {"stock": patch.stock[TARGET], "patched": patch.replacements[TARGET]}


def _admissions(hashers: dict, length: int, share: float, block_size: int, repeats: int) -> dict:
    """Stage -> side -> milliseconds, for prompts of which a share was seen before."""
    rng = random.Random(f"{length} {share}")
    known = _tokens(rng, int(length * share))
    fresh = length - len(known) or NEW_TOKENS
    managers = {side: _manager(length, block_size) for side in SIDES}
    times: dict = {stage: {side: [] for side in SIDES} for stage in STAGES}
    for turn in range(repeats + 1):
        new = _tokens(rng, fresh)
        digests = []
        for side in SIDES if turn % 2 else SIDES[::-1]:
            # Copied element by element: a prompt that arrives shares no int objects with those before it.
            tokens = json.loads(json.dumps(known + new)) if turn else list(known)
            if len(tokens) < block_size:
                continue
            stages, hashes = _admit(hashers[side], managers[side], tokens)
            digests.append(hashes)
            # The first turn only makes the known part known.
            for stage, seconds in stages.items() if turn else ():
                times[stage][side].append(seconds)
        if any(other != digests[0] for other in digests):
            raise AssertionError("stock and patched hashes differ")
    medians = {
        stage: {side: round(1e3 * statistics.median(values), 4) for side, values in sides.items()}
        for stage, sides in times.items()
    }
    medians["admission"] = {side: round(sum(medians[stage][side] for stage in STAGES[:3]), 4) for side in SIDES}
    return medians


def _admit(hasher: Callable, manager, tokens: list) -> tuple:
    """(stage -> seconds, block hashes) of one request."""
    request = _request(tokens)
    clock = time.thread_time
    marks = [clock()]
    request.block_hashes.extend(hasher(request))
    marks.append(clock())
    blocks, computed, *_ = manager.get_computed_blocks(request)
    marks.append(clock())
    if manager.allocate_slots(request, request.num_tokens - computed, computed, blocks) is None:
        raise AssertionError("the benchmark's cache is too small")
    marks.append(clock())
    manager.free(request)
    marks.append(clock())
    return dict(zip(STAGES, (after - before for before, after in zip(marks, marks[1:])))), request.block_hashes


def _small(hashers: dict, block_size: int) -> dict:
    """What must not become slower: side -> microseconds, interleaved."""
    rng = random.Random(0)
    long, short = _request(_tokens(rng, 1024 * block_size + 5)), _request(_tokens(rng, 100))
    long.block_hashes.extend(hashers["stock"](long))
    completing = _request(_tokens(rng, 1025 * block_size))
    completing.block_hashes.extend(hashers["stock"](completing)[:-1])
    cases = {
        "decode step, no block completed": (long, 2000),
        "decode step, a block completed": (completing, 300),
        "prompt of 100 tokens": (short, 200),
    }
    return {
        case: {side: round(1e6 * seconds, 3) for side, seconds in _interleaved(hashers, request, calls).items()}
        for case, (request, calls) in cases.items()
    }


def _interleaved(hashers: dict, request, calls: int, rounds: int = 60) -> dict:
    times: dict = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            hasher = hashers[side]
            begin = time.thread_time()
            for _ in range(calls):
                hasher(request)
            times[side].append((time.thread_time() - begin) / calls)
    return {side: statistics.median(values) for side, values in times.items()}


def _tokens(rng: random.Random, count: int) -> list:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def _request(tokens: list):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    offered = {
        "request_id": str(time.perf_counter_ns()),
        "prompt_token_ids": tokens,
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
        "eos_token_id": None,
    }
    return Request(**_accepted(Request.__init__, offered))


def _manager(length: int, block_size: int):
    """vLLM's KV-cache manager for one group of full attention, with room for three such prompts."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32, "use_mla": False}
    group = KVCacheGroupSpec(["layer"], FullAttentionSpec(**_accepted(FullAttentionSpec, spec)))
    blocks = 3 * ((length + NEW_TOKENS) // block_size + 2) + 1
    offered = {
        "kv_cache_config": KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
        "max_model_len": length + 2 * NEW_TOKENS,
        "scheduler_block_size": block_size,
        "hash_block_size": block_size,
        "enable_caching": True,
    }
    return KVCacheManager(**_accepted(KVCacheManager, offered))


def _accepted(function: Callable, offered: dict) -> dict:
    """The arguments that this release's function knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in known}


def table(report: dict) -> str:
    """The report as text."""
    options = report["options"]
    lines = [
        f"{reports.heading(report)}; blocks of {options['block_size']} tokens, medians of {options['repeat']}, CPU ms",
        "stage columns: stock -> patched; admission is hash + lookup + allocate",
        "",
        f"{'algorithm':<12}{'tokens':>8}{'seen':>6}  "
        + "".join(f"{stage:>18}" for stage in (*STAGES, "admission"))
        + f"{'hash x':>9}{'of admission':>20}",
    ]
    for row in report["rows"]:
        cells = "".join(
            f"{row[stage]['stock']:>9.3f}→{row[stage]['patched']:<8.3f}" for stage in (*STAGES, "admission")
        )
        ratio = row["hash"]["stock"] / row["hash"]["patched"]
        part = " → ".join(f"{row['hash'][side] / row['admission'][side]:.0%}" for side in SIDES)
        lines.append(f"{row['algorithm']:<12}{row['length']:>8}{row['share']:>6.0%}  {cells}{ratio:>8.1f}x{part:>20}")
    lines += ["", f"{'µs a call':<12}{'stock':>44}{'patched':>12}"]
    for row in report["small"]:
        for case, sides in row.items():
            if case != "algorithm":
                ratio = sides["stock"] / sides["patched"]
                lines.append(
                    f"{row['algorithm']:<12}{case:<34}{sides['stock']:>10.3f}{sides['patched']:>12.3f}{ratio:>8.2f}x"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
