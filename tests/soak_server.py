"""A soak of two servers, stock and patched, side by side: `python tests/soak_server.py load` or `... adversaries`.

`load` sends thousands of requests of some hundred generated schemas to both in turn, with budgets so small that they
fill, compares every token id, and prints memory and latency round by round. `adversaries` measures what ordinary clients
wait for their tokens while others send what is made to be expensive, stock against patched.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from vllm_speedups import reporter
from vllm_speedups.bench.engine import engine_arguments
from vllm_speedups.bench.models import build_model
from vllm_speedups.bench.schemas import SCHEMAS
from vllm_speedups.bench.server import Server, stream

BUDGETS = ("MASK_CACHE", "ROW_CACHE", "PREFIX_MEMO")
NAMES = ["id", "name", "kind", "when", "tags", "size", "note", "kids", "left", "right", "a", "b", "c", "é", "x-y"]


def schema(random_: random.Random, depth: int) -> dict:
    """A schema that compiles in well under a second: deep or wide, with unions, patterns, formats, enums, bounds."""
    if depth == 0 or random_.random() < 0.15:
        return random_.choice(
            [
                {"type": "string"},
                {"type": "string", "maxLength": random_.randrange(1, 12)},
                {"type": "string", "minLength": 1, "maxLength": random_.randrange(2, 9)},
                {"type": "string", "pattern": f"^[a-z]{{{random_.randrange(1, 4)},{random_.randrange(4, 9)}}}-[0-9]+$"},
                {"type": "string", "format": random_.choice(["date", "time", "date-time", "uuid", "email", "ipv4"])},
                {"type": "integer", "minimum": random_.randrange(-50, 1), "maximum": random_.randrange(1, 9999)},
                {"type": ["number", "null"]},
                {"type": "boolean"},
                {"const": f"value {random_.randrange(1000)}"},
                {"enum": [f"{random_.choice(NAMES)}{number}" for number in range(random_.randrange(2, 30))]},
            ]
        )
    kind = random_.random()
    if kind < 0.2:
        return {"anyOf": [schema(random_, depth - 1) for _ in range(random_.randrange(2, 4))]}
    if kind < 0.4:
        return {"type": "array", "items": schema(random_, depth - 1), "maxItems": random_.randrange(2, 9)}
    wide = random_.randrange(1, 12 if depth == 1 else 4)
    properties = {name: schema(random_, depth - 1) for name in random_.sample(NAMES, wide)}
    required = [name for name in properties if random_.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def recursive(random_: random.Random) -> dict:
    """A tree whose nodes carry a generated value."""
    node = {
        "type": "object",
        "properties": {
            "value": schema(random_, 1),
            random_.choice(NAMES): {"type": "array", "items": {"$ref": "#/$defs/node"}},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def schemas(count: int) -> list:
    """Generated schemas, every fifth recursive."""
    return [
        recursive(random.Random(number)) if number % 5 == 0 else schema(random.Random(number), 1 + number % 4)
        for number in range(count)
    ]


def request(model: str, seed: int, tokens: int, guide: dict, prompt: list | None = None) -> tuple:
    """A streamed completion; `guide` are the fields of the body that guide it."""
    more = {"prompt": prompt or [1, 1000 + seed % 997], "max_tokens": tokens, "seed": seed, "temperature": 1.0}
    return "/v1/completions", {"model": model, **more, **guide}


def by_schema(content: dict) -> dict:
    """A guide of a JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "soak", "schema": content}}}


def by_grammar(text: str) -> dict:
    """A guide of an EBNF."""
    return {"structured_outputs": {"grammar": text}}


def load(options: argparse.Namespace, model: str, stock: Server, patched: Server) -> int:
    """Rounds of requests, popular schemas more often than others. 1 if a token differs or memory goes on growing."""
    guides = [by_schema(content) for content in schemas(options.schemas)]
    random_, latencies, memory, differ, tokens, refused = random.Random(7), ([], []), ([], []), 0, 0, 0
    spent = ([], [])
    print(
        "| round | requests | MiB, stock | patched | p50 / p99 s, stock | patched | CPU s, stock | patched | ids differ |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for number in range(options.rounds):
        chosen = [int(len(guides) * random_.random() ** 2) for _ in range(options.requests // options.rounds)]
        requests = [
            request(model, number * 100_000 + index, options.tokens, guides[guide])
            for index, guide in enumerate(chosen)
        ]
        answers, took = {}, {}
        for side in (0, 1) if number % 2 else (1, 0):
            before = (stock, patched)[side].cpu()
            answers[side] = (stock, patched)[side].ask(requests, options.concurrent)
            spent[side].append((stock, patched)[side].cpu() - before)
            took[side] = [answer["times"][-1] for answer in answers[side] if answer["times"]]
            latencies[side].extend(took[side] if number else ())
            memory[side].append((stock, patched)[side].memory() / 2**20)
        wrong = sum(first["ids"] != second["ids"] for first, second in zip(answers[0], answers[1]))
        differ += wrong
        refused += sum(answer["error"] is not None for answer in answers[0])
        tokens += sum(len(ids) for answer in answers[0] for ids in answer["ids"].values())
        print(
            f"| {number + 1} | {len(requests)} | {memory[0][-1]:,.0f} | {memory[1][-1]:,.0f} | {quantiles(took[0])} "
            f"| {quantiles(took[1])} | {spent[0][-1]:.1f} | {spent[1][-1]:.1f} | {wrong or 'none'} |",
            flush=True,
        )
    running = [server.metrics().get("vllm:num_requests_running") for server in (stock, patched)]
    print(f"\n{tokens:,} guided tokens, {refused} requests refused by both; requests still running: {running}")
    print(
        f"latency past the first round, p50 / p99 s: stock {quantiles(latencies[0])}, patched {quantiles(latencies[1])}"
    )
    print(f"CPU time past the first round, s: stock {sum(spent[0][1:]):.1f}, patched {sum(spent[1][1:]):.1f}")
    # Growth over the second half, when the budgets have long been full, against stock's over the same rounds.
    half = options.rounds // 2
    grown = [series[-1] - series[half] for series in memory]
    print(f"MiB grown from round {half + 1} to {options.rounds}: stock {grown[0]:.0f}, patched {grown[1]:.0f}")
    over = _held(patched, options.mib)
    return 1 if differ or any(running) or over else 0


def _held(server: Server, mib: float) -> int:
    """Print what the caches of each process hold. How many hold more than their budgets, networks included, allow."""
    over = 0
    for state in filter(None, map(reporter.ask, reporter.pids(server.pid))):
        for patch in state["patches"]:
            counts = patch["counters"]
            held = counts.get("bytes", 0) / 2**20
            if held:
                print(f"{patch['name']} in process {state['pid']}: {held:.1f} MiB held, {counts}")
            # Networks and tries have a quarter of the rows' budget beside it.
            over += held > 1.25 * mib
            over += bool(patch["failures"] or patch["differences"]) or patch["status"] != "applied"
    return over


def quantiles(seconds: list) -> str:
    """p50 / p99."""
    return f"{np.percentile(seconds, 50):.2f} / {np.percentile(seconds, 99):.2f}" if seconds else "-"


def _ambiguous(rules: int, number: int) -> str:
    names = " | ".join(f"r{rule}" for rule in range(rules))
    lines = [f'r{rule} ::= [xX] | [xX] r{rule} "{chr(97 + rule % 20)}{rule}-{number}"' for rule in range(rules)]
    return "\n".join([f'root ::= ({names})* "."', *lines])


def _empty_chain(rules: int, number: int) -> str:
    lines = [f'r{rule} ::= r{rule + 1} r{rule + 1} | "a" r{rule}' for rule in range(rules)]
    return "\n".join([f'root ::= [a-z ]* r0 "{number}"', *lines, f'r{rules} ::= "" | "b" r{rules}'])


def _words(count: int, number: int) -> list:
    random_ = random.Random(number)
    return ["".join(random_.choice("abcdefghijklmnop") for _ in range(24)) for _ in range(count)]


_PALINDROMES = 'root ::= [a-z] root [a-z] | "a" root "a" | "b" root "b" | "c" root "c" | "a" | "b" | "c"'
_NESTED = 'root ::= "(" (item){1,200} ")"\nitem ::= "a" | root | root'

# What a client may send again and again, each time with another number: guide, prompt length.
ADVERSARIES = {
    "nothing": None,
    "a new schema each time": lambda number: (by_schema(schema(random.Random(10**6 + number), 4)), 2),
    "a new list of 1,500 choices each time": lambda number: (
        {"structured_outputs": {"choice": _words(1500, number)}},
        2,
    ),
    "ambiguous rules": lambda number: (by_grammar(_ambiguous(60, number % 4)), 2),
    "states that never come again": lambda number: (by_grammar(_PALINDROMES), 2),
    "counts that nest": lambda number: (by_grammar(_NESTED), 2),
    "a new chain of 500 empty rules each time": lambda number: (by_grammar(_empty_chain(500, number)), 2),
    "prompts of 1,500 tokens that never come again": lambda number: ({}, 1500),
}


async def besieged(server: Server, model: str, adversary, options: argparse.Namespace, first: int) -> list:
    """Seconds between the tokens of ordinary clients, 8 at a time, beside as many adversaries, each with its share."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        gates, waits = (asyncio.Semaphore(8), asyncio.Semaphore(8)), []

        async def attack(number: int) -> None:
            async with gates[0]:
                guide, length = adversary(number)
                prompt = [1, *(random.Random(number).randrange(1000, 100_000) for _ in range(length - 1))]
                await stream(session, server, *request(model, number, 2 * options.tokens, guide, prompt))

        async def ordinary(seed: int) -> None:
            async with gates[1]:
                answer = await stream(
                    session, server, *request(model, seed, options.tokens, by_schema(json.loads(SCHEMAS["bounded"])))
                )
                waits.extend(np.diff([0.0, *answer["times"]]))

        numbers = range(first, first + options.requests)
        attacks = [attack(number) for number in numbers] if adversary else []
        await asyncio.gather(*map(ordinary, numbers), *attacks)
    return waits


def adversaries(options: argparse.Namespace, model: str, stock: Server, patched: Server) -> int:
    """A table: what the same requests cost both servers, and what ordinary clients waited, under each adversary."""
    chosen = {name: what for name, what in ADVERSARIES.items() if any(part in name for part in options.only or [""])}
    print("| others send | CPU s, stock | patched | ratio | ms a token, stock | patched | p99, stock | patched |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for server in (stock, patched):
        asyncio.run(besieged(server, model, None, options, 0))
    for place, (name, adversary) in enumerate(chosen.items()):
        waits, spent = ([], []), [0.0, 0.0]
        for turn in range(options.rounds):
            for side in (0, 1) if turn % 2 else (1, 0):
                server, first = (stock, patched)[side], 10**6 * (place + 1) + 10**4 * turn
                before = server.cpu()
                waits[side].extend(asyncio.run(besieged(server, model, adversary, options, first)))
                spent[side] += server.cpu() - before
        stocks, ours = (1e3 * np.array(side) for side in waits)
        print(
            f"| {name} | {spent[0]:.1f} | {spent[1]:.1f} | {spent[1] / spent[0]:.2f} | {stocks.mean():.1f} "
            f"| {ours.mean():.1f} | {np.percentile(stocks, 99):.0f} | {np.percentile(ours, 99):.0f} |",
            flush=True,
        )
    return 0


def main() -> int:
    """0, or 1 where ids differ or requests are left running."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["load", "adversaries"])
    parser.add_argument("--requests", type=int, help="in all (3,000), or of each kind of client a turn (48)")
    parser.add_argument("--rounds", type=int, help="(12), or turns of each server (3)")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=24, help="the most that a request may generate")
    parser.add_argument("--concurrent", type=int, default=32)
    parser.add_argument("--mib", type=float, default=4.0, help="each budget of the plugin")
    parser.add_argument("--only", nargs="*", help="adversaries whose names contain one of these")
    options = parser.parse_args()
    under_load = options.what == "load"
    options.requests = options.requests or (3000 if under_load else 48)
    options.rounds = options.rounds or (12 if under_load else 3)
    extra = {f"VLLM_SPEEDUPS_{name}_MB": str(options.mib) for name in BUDGETS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as up:
        model = str(build_model(Path(folder) / "model"))
        # A small cache of compiled grammars: stock's own must fill too.
        arguments = engine_arguments(model, "xgrammar", max_num_seqs=64, max_model_len=2048)
        stock, patched = (
            up.enter_context(Server(arguments, side, {"VLLM_XGRAMMAR_CACHE_MB": "16", **(extra if side else {})}))
            for side in (False, True)
        )
        for server in (stock, patched):
            server.wait_until_ready()
        return (load if under_load else adversaries)(options, model, stock, patched)


if __name__ == "__main__":
    # Servers end with the blocks that they were started in, also when somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
