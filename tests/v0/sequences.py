"""vLLM's sequences and scheduler as the tests need them, whatever their constructors are called in this release."""

from __future__ import annotations

import inspect
import random

import vllm.sequence
from vllm import SamplingParams
from vllm.config import CacheConfig, SchedulerConfig
from vllm.core.scheduler import Scheduler
from vllm.sequence import Logprob, SequenceGroup, SequenceStatus


def accepted(function, **offered) -> dict:
    """The arguments that this release's function knows."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in known}


def sequence(number: int, tokens: list, block_size: int = 16, lora_request=None):
    """One of vLLM's sequences."""
    kind = vllm.sequence.Sequence
    offered = {
        "seq_id": number, "block_size": block_size, "lora_request": lora_request, "prompt": "", "prompt_token_ids": tokens,
        "inputs": {"type": "token", "prompt": "", "prompt_token_ids": tokens},
    }  # fmt: skip
    return kind(**accepted(kind.__init__, **offered))


def grow(seq, token: int) -> None:
    seq.append_token_id(token, {token: Logprob(-0.25)})


def scheduler(blocks: int, swap_blocks: int = 512, block_size: int = 16, swap: bool = False, sequences: int = 64):
    """vLLM's scheduler with its block manager, prefix caching on, and room for `blocks` blocks."""
    limit = 65_536
    config = SchedulerConfig(
        **accepted(
            SchedulerConfig.__init__, max_num_batched_tokens=limit, max_num_seqs=sequences, max_model_len=limit,
            preemption_mode="swap" if swap else None,
        )
    )  # fmt: skip
    cache = CacheConfig(
        **accepted(
            CacheConfig.__init__, block_size=block_size, gpu_memory_utilization=0.9, swap_space=1, cache_dtype="auto",
            enable_prefix_caching=True,
        )
    )  # fmt: skip
    cache.num_gpu_blocks, cache.num_cpu_blocks = blocks, swap_blocks
    return Scheduler(**accepted(Scheduler.__init__, scheduler_config=config, cache_config=cache, lora_config=None))


class Run:
    """A scheduler driven by a seed: requests come, grow, fork, are preempted, finish. `trace` is all that can be seen."""

    def __init__(self, seed: int, blocks: int, swap: bool, forks: bool):
        self.rng = random.Random(seed)
        # Groups of several sequences are swapped out whatever the mode is, and a mode that forbids it is an error.
        self.scheduler = scheduler(blocks, swap=swap and not forks)
        self.widths = ((2, 3) if swap else (1, 1, 1, 2)) if forks else (1,)
        self.forks, self.number, self.groups, self.trace = forks, 0, [], []
        # What came to pass, so that a test can say that it saw it.
        self.events: set = set()
        base = [self.rng.randrange(50_000) for _ in range(600)]
        self.prompts = [base[: self.rng.choice((5, 40, 100, 470))] + [seed] * self.rng.randrange(90) for _ in range(8)]

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def arrive(self) -> None:
        seq = sequence(self.next_number(), list(self.rng.choice(self.prompts)))
        width = self.rng.choice(self.widths)
        offered = {
            "request_id": str(seq.seq_id), "seqs": [seq], "arrival_time": float(seq.seq_id),
            "sampling_params": SamplingParams(max_tokens=64, **({"n": width, "best_of": width} if self.forks else {})),
        }  # fmt: skip
        group = SequenceGroup(**accepted(SequenceGroup.__init__, **offered))
        group.width = width
        self.groups.append(group)
        self.scheduler.add_seq_group(group)

    def fork(self, group, seq) -> None:
        """As vLLM's output processor does for `best_of` and beams."""
        self.events.add("fork")
        child = seq.fork(self.next_number())
        group.add(child)
        grow(child, self.rng.randrange(50_000))
        self.scheduler.fork_seq(seq, child)

    def step(self) -> None:
        before = {seq.seq_id for seq in self.seqs() if seq.status == SequenceStatus.RUNNING}
        metadata, outputs = self.scheduler.schedule()[:2]
        self.events |= {seq.status.name for seq in self.seqs() if seq.seq_id in before}
        self.events |= {"computed blocks" for one in metadata if one.is_prompt and one.computed_block_nums}
        scheduled = []
        for entry in outputs.scheduled_seq_groups:
            group = entry.seq_group
            scheduled.append((group.request_id, entry.token_chunk_size))
            group.update_num_computed_tokens(entry.token_chunk_size)
            for seq in group.get_seqs(status=SequenceStatus.RUNNING):
                if len(group.get_seqs(status=SequenceStatus.RUNNING)) < group.width and self.rng.random() < 0.4:
                    self.fork(group, seq)
                grow(seq, self.rng.randrange(50_000))
                if seq.get_output_len() > 100 or self.rng.random() < 0.01:
                    seq.status = SequenceStatus.FINISHED_STOPPED
                    self.scheduler.free_seq(seq)
        tables = [(one.request_id, one.block_tables, one.computed_block_nums, one.is_prompt) for one in metadata]
        moved = [str(getattr(outputs, f"blocks_to_{kind}")) for kind in ("swap_in", "swap_out", "copy")]
        self.trace.append((scheduled, moved, tables, self.scheduler.block_manager.get_num_free_gpu_blocks(), self.held()))
        self.scheduler.free_finished_seq_groups()
        self.groups = [group for group in self.groups if not group.is_finished()]

    def seqs(self) -> list:
        return [seq for group in self.groups for seq in group.get_seqs()]

    def held(self) -> list:
        """What every sequence holds, with its last block hashes."""
        return [
            (
                seq.seq_id, seq.status.name, list(seq.get_token_ids()), repr(seq.data), seq.data.stage,
                [seq.hash_of_block(block) for block in range(seq.get_len() // 16 + 1)[-3:]],
            )
            for seq in self.seqs()
        ]  # fmt: skip

    def go(self, steps: int):
        for _ in range(steps):
            if len(self.groups) < 12 and self.rng.random() < 0.5:
                self.arrive()
            if self.groups:
                self.step()
        return self
