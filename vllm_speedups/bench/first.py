"""`vllm-speedups bench first`: how long requests take whose grammar was never seen, stock and patched.

Every turn has a schema of its own, which both engines, one stock and one patched, meet for the first time: compiling it,
filling rows, applying them. They are asked in alternating order. As it is, one request for one token; with `--batch 64
--tokens 64` it is what the other benchmarks call cold, repeated.
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
from .report import Unusable, say


def add_arguments(parser) -> None:
    """The arguments of `vllm-speedups bench first`."""
    parser.add_argument(
        "--backends", type=reports.numbers(str), default=["xgrammar"], help="of " + ",".join(BACKENDS) + " (xgrammar)"
    )
    parser.add_argument("--schemas", type=int, default=100, help="schemas, one a turn (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="requests with the same schema at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1, help="tokens a request, at most (%(default)s)")
    reports.add_arguments(parser)


def run(options) -> int:
    """Measure and print. 0: all tokens equal; 1: one differed or an engine failed; 2: an option makes no sense."""
    try:
        reports.check(options.backends, BACKENDS, batch=options.batch, tokens=options.tokens)
        if options.schemas < 4:
            raise Unusable("--schemas must be 4 or more")
    except Unusable as error:
        print(f"bench first: {error}", file=sys.stderr)
        return 2
    rows, engines = [], {}
    with tempfile.TemporaryDirectory(prefix="vllm-speedups-") as folder:
        try:
            model = str(build_model(Path(folder)))
            for backend in options.backends:
                say(f"{backend}: starting two engines, stock and patched ...")
                row, engines[backend] = _measure(model, backend, options)
                rows.append(row)
        except (NoTokenizer, EngineFailed) as error:
            print(f"bench first: {error}", file=sys.stderr)
            return 1
    reports.finish(options, reports.make("first", options, rows=rows, engines=engines), table)
    return 0 if all(row["equal"] for row in rows) else 1


def table(report: dict) -> str:
    """The report for people: milliseconds until the requests of a turn were answered."""
    options = report["options"]
    what = "first token" if options["tokens"] == 1 else f"{options['tokens']} tokens"
    lines = [f"{reports.heading(report)}; {what} of {options['batch']} with a grammar never seen, ms", ""]
    lines.append(f"{'backend':10} {'stock: median':>14} {'p90':>7} {'patched: median':>16} {'p90':>7} {'ratio':>6}  token ids")
    for row in report["rows"]:
        stock, patched = row["stock"], row["patched"]
        lines.append(
            f"{row['backend']:10} {stock['median']:14.1f} {stock['p90']:7.1f} {patched['median']:16.1f} "
            f"{patched['p90']:7.1f} {row['ratio']:6.2f}  {'equal' if row['equal'] else 'DIFFERENT'} ({row['tokens']:,})"
        )
    lines += ["", f"ratio: the median over {options['schemas']} schemas of stock's time by the patched engine's."]
    return "\n".join(lines + reports.not_applied(report["engines"]))


def _schema(number: int) -> str:
    """One of any number of different schemas, of a few shapes and lengths of strings."""
    names = [f"{word}{number}" for word in ("name", "city", "note", "code")]
    # A long bound takes xgrammar a second to compile, next to which nothing else shows.
    longest = (512, 100_000)[number // 16 % 2] + number if number // 4 % 4 == 3 else 8 + number % 23
    kinds: list = [
        {"type": "string", "maxLength": longest},
        {"type": "integer"},
        {"type": "array", "items": {"enum": [f"{name}-{number}" for name in ("red", "green", "blue")]}, "maxItems": 4},
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^[a-z]{{1,{3 + number % 7}}}$"}]},
    ]
    properties = dict(zip(names, kinds[number % 4 :] + kinds[: number % 4]))
    schema = {"type": "object", "properties": properties, "required": names[: 1 + number % 4]}
    return json.dumps({**schema, "additionalProperties": False})


def _measure(model: str, backend: str, options) -> tuple:
    """(the row of the table, what the patched engine says of itself) for one backend."""
    arguments = engine_arguments(model, backend, max_num_seqs=options.batch)
    prompts = [[1, 2000 + number] for number in range(options.batch)]
    with Engine(arguments, patched=False) as stock, Engine(arguments, patched=True) as patched:
        pair = {"stock": stock, "patched": patched}
        for engine in pair.values():
            engine.wait_until_ready()
            # Whatever an engine does once, for its first requests and its first grammar.
            for guide in (None, {"json": '{"type": "boolean"}'}, {"json": '{"type": "null"}'}):
                engine.generate(prompts, max(options.tokens, 4), guide=guide)
        times: dict = {side: [] for side in pair}
        equal, tokens = True, 0
        for number in range(options.schemas):
            answers = {}
            for side in list(pair)[:: 1 if number % 2 else -1]:
                answers[side] = pair[side].generate(prompts, options.tokens, guide={"json": _schema(number)}, seed=number)
                times[side].append(1000 * answers[side]["seconds"])
            equal = equal and answers["stock"]["ids"] == answers["patched"]["ids"]
            tokens += answers["stock"]["tokens"]
        about = {"patches": patched.about["patches"]}
    ratios = [one / other for one, other in zip(times["stock"], times["patched"])]
    sides = {side: {"median": median(ms), "p90": quantiles(ms, n=10)[-1]} for side, ms in times.items()}
    return {"backend": backend, "tokens": tokens, "equal": equal, "ratio": median(ratios), **sides}, about
