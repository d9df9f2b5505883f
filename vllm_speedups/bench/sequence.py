"""`vllm-speedups bench sequence`: what the V0 engine spends on hashing prompts, with stock's sequences and with ours.

Two tables. `hash_of_block` over all blocks of a prompt that is new, by the prompt's length; and the share that hashing has
of what vLLM's scheduler and block manager do for requests whose prompts are cached in full: making the sequence, admitting
it, scheduling every step, freeing it, without a model. Both sides take turns in one process, and every hash is compared.
Times are the thread's CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import os
import random
import statistics
import sys
import time

from vllm_speedups.patching import APPLIED

from . import report as reports

CLASS, HASH = "vllm.sequence:SequenceData", "vllm.sequence:Sequence.hash_of_block"
SIDES = ("stock", "patched")
# A run in which every hash is looked up in a list, to tell what hashing takes of the others.
KNOWN = "known"
VOCAB_SIZE = 50_000


class NotPatched(RuntimeError):
    """Raised where the patch is not applied to this vLLM, with the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=_numbers, default=[1024, 4096, 16_384], help="(1024,4096,16384)")
    parser.add_argument("--outputs", type=_numbers, default=[1, 16, 128], help="tokens a request generates (1,16,128)")
    parser.add_argument("--requests", type=int, default=4, help="requests at a time (4)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (16)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each side; medians are shown (5)")
    reports.add_arguments(parser)


def main(argv: list | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vllm-speedups bench sequence", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(options: argparse.Namespace) -> int:
    """Measure and print. 0, or 1 where there is nothing to compare with."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        patch = _patch()
    except NotPatched as error:
        print(f"bench sequence: {error}", file=sys.stderr)
        return 1
    reports.finish(options, reports.make("sequence", options, **measure(patch, options)), table)
    return 0


def _patch():
    """The applied patch. Raises NotPatched."""
    import vllm.sequence  # noqa: F401

    from vllm_speedups import plugin

    plugin.register()
    patch = next((patch for patch in plugin.patches() if patch.name == "sequence-data"), None)
    if patch is None or patch.status != APPLIED or not patch.prove():
        raise NotPatched(f"sequence-data is {patch.status if patch else 'missing'}: {patch.reason if patch else ''}")
    return patch


def measure(patch, options: argparse.Namespace) -> dict:
    """Both tables as plain data, times in milliseconds."""
    import vllm

    results: dict = {"vllm": vllm.__version__, "block_size": options.block_size, "requests": options.requests}
    results["hashing"] = [_hashing(patch, length, options) for length in options.lengths]
    results["hashed by the block manager"] = _called()
    if results["hashed by the block manager"]:
        results["shares"] = [
            _share(patch, length, outputs, options) for length in options.lengths for outputs in options.outputs
        ]
    return results


def _called() -> bool:
    """Whether this release's block manager asks for these hashes: up to 0.6.3."""
    try:
        from vllm.core import block_manager_v1
    except ImportError:
        return False
    return "hash_of_block" in inspect.getsource(block_manager_v1)


@contextlib.contextmanager
def _side(patch, side: str, known: dict | None = None):
    """One side in place: the class that sequences are made with, and the method; for KNOWN, one that looks hashes up."""
    import vllm.sequence as module

    made = (patch.replacements if side == "patched" else patch.stock)[CLASS]
    method = patch.gates[HASH] if side == "patched" else patch.stock[HASH]
    if side == KNOWN:

        def method(self, logical_idx):
            return known[self.seq_id][logical_idx]

    before = module.SequenceData, module.Sequence.hash_of_block
    module.SequenceData, module.Sequence.hash_of_block = made, method
    try:
        yield module
    finally:
        module.SequenceData, module.Sequence.hash_of_block = before


def _hashing(patch, length: int, options) -> dict:
    """Every block of new prompts of one length."""
    rng = random.Random(length)
    times: dict = {side: [] for side in SIDES}
    for turn in range(options.repeat + 1):
        prompt, seen = _tokens(rng, length), []
        for side in SIDES if turn % 2 else SIDES[::-1]:
            with _side(patch, side) as module:
                seq = _sequence(module, turn, list(prompt), options.block_size)
                begin = time.thread_time()
                seen.append([seq.hash_of_block(block) for block in range(length // options.block_size)])
                # The first turn warms both sides up.
                times[side] += [time.thread_time() - begin] if turn else []
        if seen[0] != seen[1]:
            raise AssertionError("stock and patched hashes differ")
    return {"length": length, **{side: 1e3 * statistics.median(values) for side, values in times.items()}}


def _share(patch, length: int, outputs: int, options) -> dict:
    """What hashing takes of requests whose prompts are cached: what goes where every hash is known beforehand."""
    rng = random.Random(f"{length} {outputs}")
    prompts = [_tokens(rng, length) for _ in range(options.requests)]
    with _side(patch, "stock") as module:
        known = {
            number: _all_hashes(_sequence(module, number, prompt, options.block_size), outputs)
            for number, prompt in enumerate(prompts)
        }
    sides = (*SIDES, KNOWN)
    runs: dict = {side: [] for side in sides}
    for turn in range(options.repeat):
        for side in sides if turn % 2 else sides[::-1]:
            with _side(patch, side, known) as module:
                scheduler = _scheduler(length + outputs, options)
                _serve(module, scheduler, prompts, outputs, options.block_size)
                gc.collect()
                begin = time.thread_time()
                _serve(module, scheduler, prompts, outputs, options.block_size)
                runs[side].append(1e3 * (time.thread_time() - begin))
    totals = {side: statistics.median(values) for side, values in runs.items()}
    return {
        "length": length, "outputs": outputs, "known": totals[KNOWN],
        **{side: {"total": totals[side], "share": 1 - totals[KNOWN] / totals[side]} for side in SIDES},
    }  # fmt: skip


def _all_hashes(seq, outputs: int) -> list:
    """The hashes of all blocks of a sequence that will have grown as `_serve` lets it grow."""
    hashes = []
    for step in range(-1, outputs):
        if step >= 0:
            seq.data.append_token_id(step, -1.0)
        blocks = -(-seq.data.get_len() // seq.block_size)
        # The last one again while it grows: stock hashes what there is.
        hashes[blocks - 1 :] = [seq.hash_of_block(block) for block in range(len(hashes[: blocks - 1]), blocks)]
    return [*hashes, None]


def _serve(module, scheduler, prompts: list, outputs: int, block_size: int) -> None:
    """Requests from their arrival to the end, all at once, as the engine goes about it."""
    from vllm import SamplingParams

    running, finished = [], module.SequenceStatus.FINISHED_STOPPED
    for number, prompt in enumerate(prompts):
        seq = _sequence(module, number, prompt, block_size)
        offered = {
            "request_id": str(number), "seqs": [seq], "arrival_time": 0.0, "sampling_params": SamplingParams(),
        }  # fmt: skip
        scheduler.add_seq_group(module.SequenceGroup(**_accepted(module.SequenceGroup.__init__, offered)))
        running.append(seq)
    for step in range(outputs):
        for entry in scheduler.schedule()[1].scheduled_seq_groups:
            entry.seq_group.update_num_computed_tokens(entry.token_chunk_size)
        for seq in running:
            seq.append_token_id(step, {step: module.Logprob(-1.0)})
    for seq in running:
        seq.status = finished
        scheduler.free_seq(seq)
    scheduler.free_finished_seq_groups()


def _scheduler(length: int, options):
    """vLLM's scheduler with prefix caching on, and room for all requests."""
    from vllm.config import CacheConfig, SchedulerConfig
    from vllm.core.scheduler import Scheduler

    offered = {
        "max_num_batched_tokens": options.requests * length + 4096, "max_num_seqs": options.requests,
        "max_model_len": length + 64, "block_size": options.block_size, "gpu_memory_utilization": 0.9, "swap_space": 1,
        "cache_dtype": "auto", "enable_prefix_caching": True,
    }  # fmt: skip
    cache = CacheConfig(**_accepted(CacheConfig.__init__, offered))
    cache.num_gpu_blocks = 2 * options.requests * (length // options.block_size + 4)
    cache.num_cpu_blocks = 16
    return Scheduler(SchedulerConfig(**_accepted(SchedulerConfig.__init__, offered)), cache, None)


def _sequence(module, number: int, tokens: list, block_size: int):
    offered = {
        "seq_id": number, "block_size": block_size, "prompt": "", "prompt_token_ids": tokens,
        "inputs": {"type": "token", "prompt": "", "prompt_token_ids": tokens},
    }  # fmt: skip
    return module.Sequence(**_accepted(module.Sequence.__init__, offered))


def _accepted(function, offered: dict) -> dict:
    """The arguments that this release's function knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in known}


def _tokens(rng: random.Random, count: int) -> list:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def _numbers(text: str) -> list:
    return [int(part) for part in text.split(",") if part]


def table(results: dict) -> str:
    """The report for people."""
    lines = [
        f"vLLM {results['vllm']}, blocks of {results['block_size']} tokens",
        "",
        "hash_of_block over all blocks of a new prompt, ms",
        f"{'tokens':>8}{'stock':>12}{'patched':>12}{'faster':>10}",
    ]
    for row in results["hashing"]:
        ratio = row["stock"] / row["patched"]
        lines.append(f"{row['length']:>8,}{row['stock']:>12.3f}{row['patched']:>12.3f}{ratio:>9.1f}x")
    if not results["hashed by the block manager"]:
        return "\n".join([*lines, "", "This release's block manager does not ask for these hashes."])
    lines += [
        "",
        f"scheduler and block manager, {results['requests']} requests at a time, their prompts cached in full, ms",
        f"{'tokens':>8}{'outputs':>9}{'stock':>12}{'patched':>12}   hashing's share",
    ]
    for row in results["shares"]:
        shares = " → ".join(f"{row[side]['share']:.1%}" for side in SIDES)
        totals = "".join(f"{row[side]['total']:>12.2f}" for side in SIDES)
        lines.append(f"{row['length']:>8,}{row['outputs']:>9}{totals}   {shares}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
