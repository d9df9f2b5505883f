"""The engine process of a benchmark: one vLLM engine that runs what it is asked on standard input, JSON line by line.

Started as `python -m vllm_speedups.bench.worker` by `engine.Engine`, which sets the environment that makes it stock or
patched. Answers go to the file descriptor that standard output was at the start; vLLM's own output goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

import vllm_speedups

from .stages import Stages


def sampling_params(run: dict, index: int):
    """vLLM's parameters for prompt `index` of a run, whose `guide` may be a list to be dealt out in turn."""
    import vllm.sampling_params as known
    from vllm import SamplingParams

    # The V0 engine's name for it, and today's.
    name = "structured_outputs" if hasattr(known, "StructuredOutputsParams") else "guided_decoding"
    guides = getattr(known, "StructuredOutputsParams", None) or known.GuidedDecodingParams
    guide = run.get("guide")
    if isinstance(guide, list):
        guide = guide[index % len(guide)]
    more = dict(run.get("sampling", {}))
    if "logit_bias" in more:
        # JSON knows no numbers for keys.
        more["logit_bias"] = {int(token): bias for token, bias in more["logit_bias"].items()}
    return SamplingParams(
        max_tokens=run["max_tokens"],
        temperature=run.get("temperature", 1.0),
        n=run.get("n", 1),
        # A seed each, so that the ids do not depend on which requests happened to share a step.
        seed=None if run.get("temperature") == 0 else run["seed"] + index,
        **{name: guides(**guide) if guide else None},
        **more,
    )


def serve(engine_arguments: dict, answers) -> None:
    """Start the engine, then answer each request as `Engine.generate` says, until the input ends."""
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(**engine_arguments)
    print(json.dumps({"ready_s": time.perf_counter() - start, **_what_runs()}), file=answers, flush=True)
    for line in sys.stdin:
        run = json.loads(line)
        answer = getattr(llm, run["call"])(**run["arguments"]) if "call" in run else _answer(llm, run)
        print(json.dumps(answer), file=answers, flush=True)


def _answer(llm, run: dict) -> dict:
    prompts = [one if isinstance(one, str) else {"prompt_token_ids": one} for one in run["prompts"]]
    parameters = [sampling_params(run, index) for index in range(len(prompts))]
    stages = Stages(_synchronize()) if run.get("stages") else None
    start = time.perf_counter()
    if "abort_at_step" in run or "revert_at_step" in run:
        ids = _in_steps(llm.llm_engine, prompts, parameters, run.get("abort_at_step"), run.get("revert_at_step"))
    else:
        try:
            with stages or contextlib.nullcontext():
                outputs = llm.generate(prompts, parameters, use_tqdm=False)
        except _refusals() as error:
            return {"refused": str(error)}
        ids = [[list(one.token_ids) for one in output.outputs] for output in outputs]
    seconds = time.perf_counter() - start
    answer = {"seconds": seconds, "tokens": sum(len(one) for request in ids for one in request), "ids": ids}
    return {**answer, **({"stages": stages.summary()} if stages else {}), **_what_happened(llm)}


def _refusals() -> tuple:
    """What vLLM raises where a request asks for what the backend does not do."""
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return (ValueError,)
    return ValueError, VLLMValidationError


def _synchronize():
    """What waits for the device, None where everything happens on the processor."""
    import torch
    from vllm.platforms import current_platform

    return None if current_platform.device_type == "cpu" else torch.accelerator.synchronize


def _in_steps(engine, prompts: list, parameters: list, abort_at: int | None, revert_at: int | None) -> list:
    """Run requests step by step, abort every third one or take the plugin back in the given step. Token ids, [] for aborted."""
    for index, (prompt, parameter) in enumerate(zip(prompts, parameters)):
        engine.add_request(f"request-{index}", prompt, parameter)
    finished, step = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = [list(one.token_ids) for one in output.outputs]
        step += 1
        if step == abort_at:
            engine.abort_request([f"request-{index}" for index in range(0, len(prompts), 3)])
        if step == revert_at:
            vllm_speedups.revert()
    return [finished.get(f"request-{index}", []) for index in range(len(prompts))]


def _what_runs() -> dict:
    """What the plugin did in this process, and the device that the engine is on."""
    import torch
    from vllm.platforms import current_platform

    from vllm_speedups import plugin

    return {
        "patches": {patch.name: patch.status for patch in plugin.patches()},
        "device": _device_name(current_platform),
        "threads": torch.get_num_threads(),
    }


def _device_name(platform) -> str:
    return platform.device_type if platform.device_type == "cpu" else platform.get_device_name()


def _what_happened(llm) -> dict:
    """What the plugin did so far, and vLLM's own where it keeps them."""
    from vllm_speedups import plugin

    state = plugin.state()
    happened = {"state": state, "counters": {patch["name"]: patch["counters"] for patch in state["patches"]}}
    if llm.llm_engine.log_stats:
        happened["vllm"] = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return happened


def main() -> None:
    """Keep standard output for the answers, whatever vLLM prints."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), answers)


if __name__ == "__main__":
    main()
