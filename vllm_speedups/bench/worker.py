"""The engine process of a benchmark: one vLLM engine that runs what it is asked on standard input, JSON line by line.

Started as `python -m vllm_speedups.bench.worker` by `engine.Engine`, which sets the environment that makes it stock or
patched. Answers go to the file descriptor that standard output was at the start; vLLM's own output goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time


def sampling_params(run: dict, index: int):
    """vLLM's parameters for prompt `index` of a run. Every prompt has a seed of its own, so that runs can be repeated."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    guide = run.get("guide")
    return SamplingParams(
        max_tokens=run["max_tokens"],
        temperature=run.get("temperature", 1.0),
        n=run.get("n", 1),
        seed=None,
        structured_outputs=StructuredOutputsParams(**guide) if guide else None,
    )


def serve(engine_arguments: dict, answers) -> None:
    """Start the engine, then answer each request with its token ids and the seconds it took, until the input ends."""
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(**engine_arguments)
    print(json.dumps({"ready_s": time.perf_counter() - start, **_what_runs()}), file=answers, flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        parameters = [sampling_params(run, index) for index in range(len(prompts))]
        start = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - start
        ids = [[list(one.token_ids) for one in output.outputs] for output in outputs]
        answer = {"seconds": seconds, "tokens": sum(len(one) for request in ids for one in request), "ids": ids}
        print(json.dumps(answer), file=answers, flush=True)


def _what_runs() -> dict:
    """What the plugin did in this process, and the device that the engine is on."""
    import torch
    from vllm.platforms import current_platform

    from vllm_speedups import plugin

    return {
        "patches": {patch.name: patch.status for patch in plugin.patches()},
        "device": current_platform.device_type,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Keep standard output for the answers, whatever vLLM prints."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), answers)


if __name__ == "__main__":
    main()
