"""`vllm-speedups bench first`: how long the first token takes of a request whose grammar was never seen, stock and patched.

Every request has a schema of its own, which both engines, one stock and one patched, meet for the first time: compiling it,
filling the first row, applying it. They are asked in turn, in alternating order.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from . import report as reports
from .engine import Engine, EngineFailed, engine_arguments
from .guided import BACKENDS
from .models import NoTokenizer, build_model
from .report import say


def add_arguments(parser) -> None:
    """The arguments of `vllm-speedups bench first`."""
    parser.add_argument(
        "--backends", type=reports.numbers(str), default=["xgrammar"], help="of " + ",".join(BACKENDS) + " (xgrammar)"
    )
    parser.add_argument("--requests", type=int, default=100, help="schemas, and requests (%(default)s)")
    reports.add_arguments(parser)


def run(options) -> int:
    """Measure and print. 0: all first tokens equal; 1: one differed or an engine failed; 2: an option makes no sense."""
    unknown = sorted(set(options.backends) - set(BACKENDS))
    if unknown or options.requests < 4:
        print(
            f"bench first: --backends {','.join(unknown)}: known are {', '.join(BACKENDS)}"
            if unknown
            else "bench first: --requests must be 4 or more",
            file=sys.stderr,
        )
        return 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="vllm-speedups-") as folder:
        try:
            model = str(build_model(Path(folder)))
            for backend in options.backends:
                say(f"{backend}: starting two engines, stock and patched ...")
                rows.append(_measure(model, backend, options.requests))
        except (NoTokenizer, EngineFailed) as error:
            print(f"bench first: {error}", file=sys.stderr)
            return 1
    reports.finish(options, reports.make("first", options, rows=rows), table)
    return 0 if all(row["equal"] for row in rows) else 1


def table(report: dict) -> str:
    """The report for people: milliseconds until a request for one token was answered."""
    lines = [reports.heading(report) + "; first token of a grammar never seen, ms", ""]
    lines.append(f"{'backend':10} {'stock: median':>14} {'p90':>7} {'patched: median':>16} {'p90':>7} {'ratio':>6}  tokens")
    for row in report["rows"]:
        stock, patched = row["stock"], row["patched"]
        lines.append(
            f"{row['backend']:10} {stock['median']:14.1f} {stock['p90']:7.1f} {patched['median']:16.1f} "
            f"{patched['p90']:7.1f} {row['ratio']:6.2f}  {'equal' if row['equal'] else 'DIFFERENT'} ({row['requests']})"
        )
    return "\n".join([*lines, "", "ratio: the median over requests of stock's time by the patched engine's."])


def _schema(number: int) -> str:
    """One of any number of different schemas, of a few shapes."""
    names = [f"{word}{number}" for word in ("name", "city", "note", "code")]
    kinds: list = [
        {"type": "string", "maxLength": 8 + number % 23},
        {"type": "integer"},
        {"type": "array", "items": {"enum": [f"{name}-{number}" for name in ("red", "green", "blue")]}, "maxItems": 4},
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^[a-z]{{1,{3 + number % 7}}}$"}]},
    ]
    properties = dict(zip(names, kinds[number % 4 :] + kinds[: number % 4]))
    schema = {"type": "object", "properties": properties, "required": names[: 1 + number % 4]}
    return json.dumps({**schema, "additionalProperties": False})


def _measure(model: str, backend: str, requests: int) -> dict:
    arguments = engine_arguments(model, backend)
    with Engine(arguments, patched=False) as stock, Engine(arguments, patched=True) as patched:
        pair = {"stock": stock, "patched": patched}
        for engine in pair.values():
            engine.wait_until_ready()
            # Whatever an engine does once, for its first request and its first grammar.
            for guide in (None, {"json": '{"type": "boolean"}'}, {"json": '{"type": "null"}'}):
                engine.generate([[1, 1000]], 4, guide=guide)
        times: dict = {side: [] for side in pair}
        equal = True
        for number in range(requests):
            answers = {}
            for side in list(pair)[:: 1 if number % 2 else -1]:
                answers[side] = pair[side].generate([[1, 2000 + number]], 1, guide={"json": _schema(number)})
                times[side].append(1000 * answers[side]["seconds"])
            equal = equal and answers["stock"]["ids"] == answers["patched"]["ids"]
    ratios = [one / other for one, other in zip(times["stock"], times["patched"])]
    sides = {side: {"median": median(ms), "p90": quantiles(ms, n=10)[-1]} for side, ms in times.items()}
    return {"backend": backend, "requests": requests, "equal": equal, "ratio": median(ratios), **sides}
