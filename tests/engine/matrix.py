"""The configurations in which vLLM is used in earnest: for each, what is asked of a stock and of a patched vLLM.

`CONFIGURATIONS` lists them; `compare` runs one and says how many guided tokens were compared, and which answers differ.
Every request has its own seed, or is greedy: without, stock differs from itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Callable

from chat_model import mark_id

from vllm_speedups import reporter
from vllm_speedups.bench.engine import Engine, engine_arguments
from vllm_speedups.bench.schemas import SCHEMAS
from vllm_speedups.bench.server import Server

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["string", "number", "null"]},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
JSON, RECURSIVE = {"json": SCHEMAS["bounded"]}, {"json": json.dumps(TREE)}
REGEX = {"regex": r"(red|green|blue)( [a-z]{2,9}){1,30}\."}
CHOICE = {"choice": ["alpha", "alphabet", "beta", "a longer choice, with a comma", "a longer choice, with a colon"]}
EBNF = {"grammar": 'root ::= item (", " item)*\nitem ::= [a-z]+ "=" [0-9]+'}
LARK = {"grammar": 'start: item (", " item)*\nitem: /[a-z]+/ "=" /[0-9]+/'}
GUIDES = {
    "xgrammar": [JSON, REGEX, RECURSIVE, EBNF, CHOICE, None],
    "guidance": [JSON, REGEX, RECURSIVE, LARK, CHOICE, None],
    "outlines": [JSON, REGEX, CHOICE, None],
}
# Can always go on, among the bytes that are the chat model's tokens 97 to 122.
AMONG_LETTERS = {"regex": "([a-m]{1,4}[n-z]{1,3})+"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
    for name, schema in (
        ("person", json.loads(SCHEMAS["bounded"])),
        ("weather", {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}),
    )
]


class NotHere(Exception):
    """Raised where a configuration cannot run in this environment; says why."""


@dataclass
class Outcome:
    """What a work found in one vLLM: answers that must be equal, and how many guided tokens they hold."""

    answers: list = field(default_factory=list)
    guided: int = 0
    tools_called: int = 0

    def add(self, ids: Sequence, guided: int, more: object = None) -> None:
        """An answer, and how many of its ids were guided."""
        self.answers.append((list(ids), more))
        self.guided += guided


@dataclass
class Work:
    """One thing to ask of a vLLM, and a row of the table."""

    name: str
    ask: Callable  # (Engine or Server, scale) -> Outcome
    # (vLLM's own metrics, outcome) -> whether what the name says took place
    evidence: Callable | None = None


@dataclass
class Configuration:
    """One way to run vLLM, and what to ask of it."""

    name: str
    works: list
    arguments: dict = field(default_factory=dict)
    backend: str = "xgrammar"
    server: bool = False
    chat: bool = False  # the small chat model, in Hugging Face's form
    environment: dict = field(default_factory=dict)
    together: bool = True  # whether stock and patched may be up at the same time


def prompts(count: int, length: int = 2, start: int = 1000) -> list:
    """Prompts of `length` tokens, each another."""
    return [[1, *((start + 7 * index + place) % 3000 + 4 for place in range(length - 1))] for index in range(count)]


def ask(engine: Engine, outcome: Outcome, texts: list, tokens: int, guide: list, **run) -> list:
    """Ask an engine and add its answers to the outcome. Returns the ids of each request's first sequence."""
    ids = engine.generate(texts, tokens, guide=guide, **run)["ids"]
    for index, sequences in enumerate(ids):
        guided = sum(map(len, sequences)) if guide[index % len(guide)] else 0
        outcome.add(sequences, guided)
    return [sequences[0] if sequences else [] for sequences in ids]


def batches(engine: Engine, scale: float, count: int = 48, tokens: int = 64, length: int = 2, **run) -> Outcome:
    """Two batches, the second with new seeds: cold, then with all that was remembered."""
    outcome, guides = Outcome(), GUIDES[engine.backend]
    for visit in range(2):
        ask(engine, outcome, prompts(max(6, int(count * scale)), length), tokens, guides, seed=1000 * visit, **run)
    return outcome


def many(engine: Engine, scale: float) -> Outcome:
    """More requests at once than vLLM fills serially, and several samples of a request."""
    outcome, guides = Outcome(), GUIDES[engine.backend]
    ask(engine, outcome, prompts(160), max(6, int(48 * scale)), guides[:2], seed=3)
    ask(engine, outcome, prompts(12), max(6, int(48 * scale)), guides, seed=5, n=4)
    return outcome


def drafts(engine: Engine, scale: float) -> Outcome:
    """Prompts that repeat themselves, so that n-grams are found and most drafts are wrong. Greedy only."""
    outcome, guides = Outcome(), GUIDES[engine.backend]
    repeating = [[1, *([1034 + index, 1005, 1097] * 6)] for index in range(max(6, int(24 * scale)))]
    for _ in range(2):
        ask(engine, outcome, repeating, 64, guides, temperature=0.0)
    return outcome


def thoughts(engine: Engine, scale: float) -> Outcome:
    """The grammar begins at the end of thoughts, which comes after some twenty tokens, now and then never."""
    sampling = {"logit_bias": {mark_id("</think>"): 5.0}, "skip_special_tokens": False}
    return _thoughts(engine, scale, GUIDES["xgrammar"], sampling=sampling)


def thoughts_and_drafts(engine: Engine, scale: float) -> Outcome:
    """The same, greedy, with drafts that may span the end of thoughts: among few tokens, so that it is chosen at all."""
    sampling = {"allowed_token_ids": [*range(97, 123), mark_id("</think>")], "skip_special_tokens": False}
    return _thoughts(engine, scale, [AMONG_LETTERS, None, AMONG_LETTERS], sampling=sampling, temperature=0.0)


def _thoughts(engine: Engine, scale: float, guides: list, **run) -> Outcome:
    outcome, end = Outcome(), mark_id("</think>")
    thinking = [[mark_id("<|turn|>"), 500 + index, mark_id("<think>")] for index in range(max(6, int(48 * scale)))]
    for visit in range(2):
        ids = engine.generate(thinking, 96, guide=guides, seed=1000 * visit, **run)["ids"]
        for index, (sequence,) in enumerate(ids):
            outcome.add(sequence, unthought(sequence, end) if guides[index % len(guides)] else 0)
    return outcome


def turns(engine: Engine, scale: float) -> Outcome:
    """Conversations over one long system prompt, whose blocks are found again where prefixes are cached."""
    outcome, guides = Outcome(), GUIDES["xgrammar"]
    talks = [[*prompts(1, 400)[0], 2000 + number] for number in range(max(4, int(16 * scale)))]
    for turn in range(4):
        answers = ask(engine, outcome, talks, 32, guides, seed=100 * turn)
        talks = [[*talk, *answer, *range(500 + turn, 530)] for talk, answer in zip(talks, answers)]
    return outcome


def naps(engine: Engine, scale: float) -> Outcome:
    """Conversations, with the prefix cache reset and the engine put to sleep between turns."""
    outcome, guides = Outcome(), GUIDES["xgrammar"]
    talks = [[*prompts(1, 200)[0], 2000 + number] for number in range(max(4, int(16 * scale)))]
    for turn in range(6):
        answers = ask(engine, outcome, talks, 32, guides, seed=100 * turn)
        talks = [[*talk, *answer, *range(500 + turn, 510)] for talk, answer in zip(talks, answers)]
        if turn % 2:
            outcome.add([engine.call("reset_prefix_cache")], 0)
        else:
            # What a CPU can: requests are aborted or held back, caches dropped; weights stay where they are.
            engine.call("sleep", level=turn // 2 % 2)
            engine.call("wake_up")
    return outcome


def aborted(engine: Engine, scale: float) -> Outcome:
    """Every third request is aborted midway."""
    outcome = Outcome()
    for visit in range(2):
        ask(engine, outcome, prompts(max(6, int(48 * scale))), 48, GUIDES["xgrammar"], seed=visit, abort_at_step=9)
    return outcome


def body(model: str, guide: dict | None, **more) -> dict:
    """The part of an API request that says how to guide: JSON schemas as `response_format`, others as they are."""
    if guide is None:
        return {"model": model, **more}
    if "json" in guide:
        schema = {"name": "answer", "schema": json.loads(guide["json"])}
        return {"model": model, "response_format": {"type": "json_schema", "json_schema": schema}, **more}
    return {"model": model, "structured_outputs": guide, **more}


def listen(server: Server, outcome: Outcome, requests: list, guided: list, begins_after: int | None = None) -> None:
    """Ask a server and add what it said to the outcome. `begins_after`: the token behind which grammars begin.

    Where thoughts and tool calls are told from the text as it streams, the pieces that a client gets depend on how many
    tokens arrive together: stock's texts differ from its own then, and only ids are compared.
    """
    names = ("finish", "error") if begins_after else ("texts", "finish", "error")
    for answer, is_guided in zip(server.ask(requests), guided):
        said = {name: answer[name] for name in names}
        outcome.tools_called += any(arguments for _, arguments in answer["calls"].values())
        ids = answer["ids"].get("0", [])
        outcome.add(ids, unthought(ids, begins_after) if is_guided else 0, said)


def unthought(ids: list, end: int | None) -> int:
    """How many tokens follow the end of thoughts; all where nobody thinks."""
    if end is None:
        return len(ids)
    return len(ids) - ids.index(end) - 1 if end in ids else 0


def completions(server: Server, scale: float, tokens: int = 64) -> Outcome:
    """Concurrent clients of /v1/completions, streaming, with every kind of guide that the backend has."""
    outcome, guides = Outcome(), GUIDES[server.backend]
    for visit in range(2):
        requests, guided = [], []
        for index, prompt in enumerate(prompts(max(6, int(48 * scale)))):
            guide = guides[index % len(guides)]
            more = {"prompt": prompt, "max_tokens": tokens, "seed": 1000 * visit + index, "temperature": 1.0}
            requests.append(("/v1/completions", body(server.model, guide, **more)))
            guided.append(guide is not None)
        listen(server, outcome, requests, guided)
    return outcome


def hang_ups(server: Server, scale: float) -> Outcome:
    """Half of the clients hang up after a few tokens; what the others, and what those had got by then, is compared."""
    outcome, guides = Outcome(), GUIDES[server.backend]
    for visit in range(2):
        requests = []
        for index, prompt in enumerate(prompts(max(6, int(60 * scale)))):
            more = {"prompt": prompt, "max_tokens": 64, "seed": 1000 * visit + index, "temperature": 1.0}
            request = ("/v1/completions", body(server.model, guides[index % len(guides)], **more))
            requests.append((*request, 3 + index % 9) if index % 2 else request)
        for index, answer in enumerate(server.ask(requests)):
            ids = answer["ids"].get("0", [])
            if index % 2:
                # A chunk may hold several tokens: how many were read depends on timing, which they are does not.
                ids = ids[: 3 + index % 9]
            outcome.add(ids, len(ids) if guides[index % len(guides)] else 0, answer["error"])
    return outcome


def tool_calls(server: Server, scale: float) -> Outcome:
    """Chats with tools, named, required and free, beside chats with a response format and plain ones."""
    outcome = Outcome()
    choices = ["required", "auto", {"type": "function", "function": {"name": "person"}}, "format", "none"]
    for visit in range(2):
        requests, guided = [], []
        for index in range(max(10, int(60 * scale))):
            choice = choices[index % len(choices)]
            more = {
                "messages": [{"role": "user", "content": f"Call number {index}, please."}],
                "max_tokens": 96,
                "seed": 1000 * visit + index,
                "temperature": 1.0,
                # A model of random weights would never begin a call, or end its thoughts.
                "logit_bias": {str(mark_id("<tool_call>")): 5.0, str(mark_id("</think>")): 5.0},
            }
            if choice == "format":
                more = body(server.model, JSON, **more)
            elif choice != "none":
                more = {"model": server.model, "tools": TOOLS, "tool_choice": choice, **more}
            requests.append(("/v1/chat/completions", {"model": server.model, **more}))
            guided.append(choice != "none")
        listen(server, outcome, requests, guided, begins_after=mark_id("</think>"))
    return outcome


def preempted(metrics: dict, outcome: Outcome) -> bool:
    """Whether vLLM preempted requests."""
    return metrics["vllm:num_preemptions"] > 0


def found_blocks(metrics: dict, outcome: Outcome) -> bool:
    """Whether vLLM found cached blocks."""
    return metrics["vllm:prefix_cache_hits"] > 0


def called_tools(metrics: dict, outcome: Outcome) -> bool:
    """Whether the model called tools, with arguments."""
    return outcome.tools_called > 0


def rejected_drafts(metrics: dict, outcome: Outcome) -> bool:
    """Whether drafts were accepted and rejected."""
    return 0 < metrics["vllm:spec_decode_num_accepted_tokens"] < metrics["vllm:spec_decode_num_draft_tokens"]


def chunked(engine: Engine, scale: float) -> Outcome:
    """Prompts of more tokens than fit into a step."""
    return batches(engine, scale, length=150)


def crowded(engine: Engine, scale: float) -> Outcome:
    """More prompts than the KV cache holds to their ends."""
    return batches(engine, scale, count=24, length=12)


OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
STATS = {"disable_log_stats": False}
PARALLEL = {"tensor_parallel_size": 2, "max_num_seqs": 64}
# Each process on a core of its own.
PINNED = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
THINKING = {"structured_outputs_config": {"reasoning_parser": "deepseek_r1"}}
COMPLETIONS, BATCHES, MANY = Work("completions", completions), Work("batches", batches), Work("160 at once", many)


def _budgets(mib: str) -> dict:
    return {f"VLLM_SPEEDUPS_{cache}_MB": mib for cache in ("MASK_CACHE", "ROW_CACHE", "PREFIX_MEMO")}


def _configurations() -> list:
    one = Configuration
    found = [
        one(
            "server, asynchronous scheduling",
            [COMPLETIONS, Work("clients that hang up", hang_ups)],
            {"async_scheduling": True},
            server=True,
        ),
        one("server, synchronous scheduling", [COMPLETIONS], {"async_scheduling": False}, server=True),
        one(
            "server, chats",
            [Work("tool calls by structural tags", tool_calls, called_tools)],
            {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"},
            server=True,
            chat=True,
        ),
        one(
            "server, data parallel 2",
            [COMPLETIONS],
            {"data_parallel_size": 2},
            server=True,
            environment=PINNED,
            together=False,
        ),
        one("server, guidance", [COMPLETIONS], {}, "guidance", server=True),
        one("server, outlines", [COMPLETIONS], {}, "outlines", server=True),
        one(
            "engine in its own process",
            [
                BATCHES,
                MANY,
                Work("aborted midway", aborted),
                Work("prefix caching", turns, found_blocks),
                Work("sleep, wake, reset_prefix_cache", naps),
            ],
            {"max_num_seqs": 256, "block_size": 32, "max_model_len": 1024, **STATS},
            environment=OWN_PROCESS,
        ),
        one(
            "no prefix caching, chunked prefill",
            [Work("prompts in chunks", chunked), Work("conversations", turns)],
            {
                "enable_prefix_caching": False,
                "enable_chunked_prefill": True,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 48,
                "max_model_len": 1024,
            },
        ),
        one(
            "KV cache of 17 blocks",
            [Work("preempted", crowded, preempted)],
            {"num_gpu_blocks_override": 17, "block_size": 32, "max_model_len": 128, **STATS},
        ),
        one("tensor parallel 2", [BATCHES], PARALLEL, environment={**OWN_PROCESS, **PINNED}, together=False),
        one(
            "tensor parallel 2, Ray",
            [BATCHES],
            {**PARALLEL, "distributed_executor_backend": "ray"},
            environment={**OWN_PROCESS, **PINNED},
            together=False,
        ),
        one("thoughts", [Work("before the grammar", thoughts)], THINKING, chat=True),
        one(
            "thoughts, n-gram drafts",
            [Work("before the grammar", thoughts_and_drafts)],
            {**THINKING, "speculative_config": NGRAM},
            chat=True,
        ),
        one("bfloat16, budgets of a quarter MiB", [BATCHES], {"dtype": "bfloat16"}, environment=_budgets("0.25")),
        one("budgets of nothing", [BATCHES], environment=_budgets("0")),
    ]
    for backend in ("guidance", "outlines"):
        found.append(
            one(
                f"engine in its own process, {backend}",
                [BATCHES, MANY],
                {"max_num_seqs": 256},
                backend,
                environment=OWN_PROCESS,
            )
        )
    for backend in ("xgrammar", "guidance", "outlines"):
        found.append(
            one(
                f"n-gram drafts, {backend}",
                [Work("drafts rejected", drafts, rejected_drafts)],
                {"speculative_config": NGRAM, **STATS},
                backend,
            )
        )
    return found


CONFIGURATIONS = {configuration.name: configuration for configuration in _configurations()}


def start(configuration: Configuration, models: dict, patched: bool):
    """An Engine or a Server of a configuration. `models`: folders by "plain" and "chat". Raises NotHere."""
    if configuration.arguments.get("distributed_executor_backend") == "ray" and find_spec("ray") is None:
        raise NotHere("ray is not installed")
    model = str(models["chat" if configuration.chat else "plain"])
    arguments = {"max_num_seqs": 64, **configuration.arguments}
    if configuration.chat:
        arguments = {"tokenizer_mode": "hf", **arguments}
    arguments = engine_arguments(model, configuration.backend, **arguments)
    one = (Server if configuration.server else Engine)(arguments, patched, configuration.environment)
    one.backend, one.model = configuration.backend, model
    return one


def compare(configuration: Configuration, models: dict, scale: float = 1.0, stock_alone: bool = False) -> list:
    """Run a configuration stock and patched, or stock twice. For each of its works a dictionary:

    `work`, the `requests` and `guided` tokens compared, the number of `different` answers and the first of them as
    `examples`, the `errors` that the server answered, whether `evidence` was found in both, how many `processes` of the
    patched vLLM say that patches are applied, and how many rows they had `copied` from their caches by then.
    """
    choices = (False, not stock_alone)
    with ExitStack() as up:
        pair = [
            up.enter_context(start(configuration, models, patched)) for patched in choices if configuration.together
        ]
        runs = []
        for index, patched in enumerate(choices):
            with ExitStack() as alone:
                one = pair[index] if pair else alone.enter_context(start(configuration, models, patched))
                one.wait_until_ready()
                runs.append([_run(work, one, scale) for work in configuration.works])
                processes, copied = _patched(one)
    return [
        {"work": work.name, **_difference(*outcomes), "processes": processes, "copied": copied}
        for work, *outcomes in zip(configuration.works, *runs)
    ]


def _run(work: Work, one, scale: float) -> tuple:
    outcome = work.ask(one, scale)
    if work.evidence is None:
        return outcome, True
    metrics = one.metrics() if isinstance(one, Server) else one.generate([[1, 5]], 1)["vllm"]
    return outcome, work.evidence(metrics, outcome)


def _difference(stock: tuple, other: tuple) -> dict:
    (first, shown), (second, also_shown) = stock, other
    examples = [answers for answers in zip(first.answers, second.answers) if answers[0] != answers[1]]
    errors = Counter(str(more["error"])[:200] for _, more in first.answers if isinstance(more, dict) and more["error"])
    return {
        "guided": first.guided,
        "requests": len(first.answers),
        "different": len(examples) + abs(len(first.answers) - len(second.answers)),
        "examples": examples[:3],
        "errors": dict(errors),
        "evidence": shown and also_shown,
    }


def _patched(one) -> tuple:
    """How many processes of an Engine or a Server say that patches are applied, and how many rows came from caches."""
    states = [state for state in map(reporter.ask, reporter.pids(one.pid)) if state]
    applied = [state for state in states if any(patch["status"] == "applied" for patch in state["patches"])]
    copied = sum(
        patch["counters"].get("hits", 0)
        for state in applied
        for patch in state["patches"]
        if patch["name"] not in ("block-hashes", "grammar-masks")
    )
    return len(applied), copied
