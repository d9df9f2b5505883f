"""`vllm-speedups bench guided`: guided decoding on the user's own vLLM and model, stock and patched side by side.

For each backend two engines are alive, in processes of their own, and asked in turn; every token id is compared.

    unguided     the same requests without a grammar
    cold         a schema's first requests in both engines, compiling the grammar included; at the first batch size only,
                 once. (Masks that another schema had already are known by then.)
    warm         the same requests again
    new outputs  other seeds, once the schema was used
    greedy       compared and not timed

Stock's warm requests are what was called "no cache" when a mask cache for vLLM was first reported (outlines, pull 939).
Where a step's time goes is measured in a run of its own: see `stages.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from . import report as reports
from .engine import Engine, EngineFailed, engine_arguments
from .models import VOCAB_SIZE, NoTokenizer, build_model
from .report import Unusable, say
from .schemas import SCHEMAS, NoSchema, find
from .stages import STAGES

BACKENDS = ("outlines", "xgrammar", "guidance")
# name, guided, seed of the first request, repeated.
RUNS = (
    ("unguided", False, 0, True),
    ("cold", True, 0, False),
    ("warm", True, 0, True),
    ("new outputs", True, 1000, True),
)
# Sampling with a seed for each request is the rule above; greedy decoding is compared too, and not timed.
GREEDY = 16
PROMPT = "Request {}: answer with one JSON object, its values made up."


def add_arguments(parser) -> None:
    """The arguments of `vllm-speedups bench guided`."""
    listed = reports.numbers(str)
    parser.add_argument(
        "--model", help="a model that vLLM can load, folder or name (default: a small one with dummy weights)"
    )
    parser.add_argument(
        "--engine-args",
        default="{}",
        metavar="JSON",
        help='more arguments of vLLM\'s LLM, such as \'{"dtype": "half"}\'',
    )
    parser.add_argument(
        "--prompt", default=PROMPT, help="with --model: the prompt, {} is the request's number (%(default)s)"
    )
    parser.add_argument(
        "--backends", type=listed, default=list(BACKENDS), help="comma-separated (" + ",".join(BACKENDS) + ")"
    )
    parser.add_argument(
        "--batches", type=reports.numbers(int), default=[64, 16], help="requests at once, comma-separated (64,16)"
    )
    parser.add_argument(
        "--schemas", type=listed, default=["bounded"], help="of " + ",".join(SCHEMAS) + ", all, or JSON files (bounded)"
    )
    parser.add_argument("--tokens", type=int, default=32, help="tokens a request, at most (%(default)s)")
    parser.add_argument("--requests", type=int, default=1, help="requests a run, in batches (%(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="pairs of runs, at most; medians are shown (%(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=5,
        help="past this nothing is repeated and no further batch size begun; 0: no limit (%(default)s)",
    )
    parser.add_argument("--disable-any-whitespace", action="store_true", help="vLLM's option of that name")
    reports.add_arguments(parser, plot=True)


def run(options) -> int:
    """Measure and print. 0: all ids equal; 1: an id differed or an engine failed; 2: an option or a part is missing."""
    from .plots import guided

    return run_as("guided", options, guided)


def run_as(what: str, options, draw=None) -> int:
    """`run` for whichever command has these options."""
    with tempfile.TemporaryDirectory(prefix="vllm-speedups-") as folder:
        try:
            schemas, more = _checked(options)
            model = options.model or str(build_model(Path(folder)))
        except (Unusable, NoSchema, NoTokenizer) as error:
            print(f"{what}: {error}", file=sys.stderr)
            return 2
        session = _Session(model, schemas, more, options)
        for number, backend in enumerate(options.backends, 1):
            say(f"[{number}/{len(options.backends)}] {backend}: starting two engines, stock and patched ...")
            session.measure(backend, number / len(options.backends))
    report = reports.make(what, options, vocabulary=None if options.model else VOCAB_SIZE, **session.results())
    report["machine"]["device"] = session.device
    reports.finish(options, report, table, draw)
    wrong = any(not row.get("equal", True) for row in report["rows"])
    return 1 if wrong or any(engine["failed"] for engine in report["engines"].values()) else 0


def _checked(options) -> tuple:
    """(schemas by name, more arguments of the engine). Raises Unusable or NoSchema."""
    numbers = {name: getattr(options, name) for name in ("tokens", "repeat", "requests")}
    reports.check(options.backends, BACKENDS, batches=min(options.batches, default=0), **numbers)
    if not options.schemas:
        raise Unusable(f"--schemas: none given; built in are {', '.join(SCHEMAS)}")
    try:
        more = json.loads(options.engine_args)
        if not isinstance(more, dict):
            raise ValueError("that is no object")
    except ValueError as error:
        raise Unusable(f"--engine-args {options.engine_args!r}: a JSON object is needed: {error}") from None
    if "{}" not in options.prompt:
        raise Unusable("--prompt needs {} where the request's number goes, so that requests differ")
    names = list(SCHEMAS) if options.schemas == ["all"] else options.schemas
    return dict(find(name) for name in names), more


class _Session:
    """The measurement: what is asked, what was answered, and the time that is left."""

    def __init__(self, model: str, schemas: dict, more: dict, options):
        self._model, self._schemas, self._more, self._options = model, schemas, more, options
        self._start = time.monotonic()
        self._pairs: dict = {}
        self._stages: list = []
        self._refused: dict = {}
        self._engines: dict = {}
        self._forward = False
        self.device = "cpu"

    def measure(self, backend: str, share: float) -> None:
        """Everything for one backend, repeated while less than `share` of the session's time has passed."""
        about = self._engines[backend] = {"failed": "", "patches": {}, "threads": None}
        try:
            with Engine(self._arguments(backend), patched=False) as stock:
                # Two engines that size up one accelerator's memory at the same time would see each other.
                alone = stock.wait_until_ready() if _accelerator() else None
                with Engine(self._arguments(backend), patched=True) as patched:
                    ready = [alone or stock.wait_until_ready(), patched.wait_until_ready()]
                    about.update(patches=ready[1]["patches"], threads=ready[1]["threads"])
                    self.device = ready[1]["device"]
                    self._rounds(backend, (stock, patched), share)
        except EngineFailed as error:
            about["failed"] = str(error)
            print(f"{backend}: {error}", file=sys.stderr)

    def _rounds(self, backend: str, engines: tuple, share: float) -> None:
        options = self._options
        for engine in engines:
            # As long as a run: the first one of an engine is slower than any later one.
            engine.generate(self._prompts(options.batches[0]), options.tokens)
        for number in range(options.repeat):
            began = time.monotonic()
            for batch in options.batches:
                if batch != options.batches[0] and self._late(share, 0.0):
                    say(f"  batch {batch}: no time is left for it (--minutes)")
                    continue
                for name, guided, seed, repeated in RUNS:
                    for schema in self._schemas if guided else (None,):
                        if (number and not repeated) or (name == "cold" and batch != options.batches[0]):
                            continue
                        self._ask(backend, engines, schema, batch, name, seed=seed)
                if not number:
                    for schema in self._schemas:
                        if batch == options.batches[0]:
                            self._ask(backend, engines, schema, batch, "greedy", temperature=0.0)
                        self._ask(backend, engines, schema, batch, "stages", stages=True)
            if self._late(share, time.monotonic() - began):
                break

    def _late(self, share: float, needed: float) -> bool:
        """Whether what needs so many seconds more would end after `share` of the time."""
        minutes = self._options.minutes
        return bool(minutes) and time.monotonic() + needed > self._start + 60 * minutes * share

    def _ask(self, backend: str, engines: tuple, schema: str | None, batch: int, name: str, **arguments) -> None:
        key = (backend, schema, batch, name)
        if (backend, schema) in self._refused:
            return
        if schema:
            arguments["guide"] = {"json": self._schemas[schema]}
        count = min(batch, GREEDY) if name == "greedy" else batch * (self._options.requests if schema else 1)
        # Who was asked last is asked first: neither engine always follows the other.
        self._forward = not self._forward
        asked = engines if self._forward else engines[::-1]
        pair = [engine.generate(self._prompts(count), self._options.tokens, **arguments) for engine in asked]
        pair = pair if self._forward else pair[::-1]
        refused = next((answer["refused"] for answer in pair if "refused" in answer), None)
        if refused:
            self._refused[backend, schema] = refused.splitlines()[0][:200]
            say(f"  {schema}: refused, {self._refused[backend, schema]}")
        elif name == "stages":
            sides = dict(zip(("stock", "patched"), (answer["stages"] for answer in pair)))
            self._stages.append({"backend": backend, "schema": schema, "batch": batch, **sides})
        else:
            self._pairs.setdefault(key, []).append(pair)
            what = f"{schema or ''} {batch} {name}".strip()
            say(f"  {time.monotonic() - self._start:4.0f} s  {what:28} {_rates(_row(key, [pair]))}")

    def _prompts(self, count: int) -> list:
        if self._options.model:
            return [self._options.prompt.replace("{}", str(index)) for index in range(count)]
        return [[1, 1000 + index] for index in range(count)]

    def _arguments(self, backend: str) -> dict:
        options = self._options
        more = {"max_num_seqs": max(options.batches), "max_model_len": max(512, options.tokens + 128)}
        if _accelerator():
            more["gpu_memory_utilization"] = 0.4
        if options.disable_any_whitespace:
            more["structured_outputs_config"] = {"disable_any_whitespace": True}
        return engine_arguments(self._model, backend, small=not options.model, **{**more, **self._more})

    def results(self) -> dict:
        """The rows, the stages, the schemas that were refused, and what is to be said of the engines."""
        refused = [{"backend": one[0], "schema": one[1], "reason": why} for one, why in self._refused.items()]
        order = {name: index for index, (name, *_) in enumerate(RUNS)}
        keys = sorted(
            self._pairs, key=lambda key: (list(self._engines).index(key[0]), self._order(key), order.get(key[3], 9))
        )
        rows = [_row(key, self._pairs[key]) for key in keys]
        return {"rows": rows, "stages": self._stages, "refused": refused, "engines": self._engines}

    def _order(self, key: tuple) -> tuple:
        """Larger batches first; in each, what is unguided, then the schemas as they were given."""
        return -key[2], [None, *self._schemas].index(key[1])


def _accelerator() -> bool:
    import torch

    return torch.cuda.is_available()


def _row(key: tuple, pairs: list) -> dict:
    """A row of the report; rates in tokens/s, medians over the pairs."""
    rates = [[answer["tokens"] / answer["seconds"] for answer in pair] for pair in pairs]
    ratios = [patched / stock for stock, patched in rates]
    return {
        **dict(zip(("backend", "schema", "batch", "name"), key)),
        "timed": key[3] != "greedy",
        "stock": median(rate[0] for rate in rates),
        "patched": median(rate[1] for rate in rates),
        "ratio": median(ratios),
        "rates": {"stock": [rate[0] for rate in rates], "patched": [rate[1] for rate in rates]},
        "ratios": ratios,
        "tokens": sum(pair[0]["tokens"] for pair in pairs),
        "equal": all(pair[0]["ids"] == pair[1]["ids"] for pair in pairs),
    }


def _rates(row: dict) -> str:
    ids = f"ids {'equal' if row['equal'] else 'DIFFER'}"
    if not row["timed"]:
        return ids
    return f"stock {row['stock']:6.0f} tokens/s, patched {row['patched']:6.0f}, ratio {row['ratio']:.2f}, {ids}"


def table(report: dict) -> str:
    """The report as text: throughput, ratios with their spread, whether the ids are equal, where the time goes."""
    options, rows = report["options"], report["rows"]
    about = [
        f"{reports.heading(report)}; {options['tokens']} tokens",
        f"model {options['model']}" if options.get("model") else f"vocabulary {report['vocabulary']:,}",
        "tokens/s",
        *(["disable_any_whitespace"] if options["disable_any_whitespace"] else []),
    ]
    # What is the same in every row is said once.
    shown = ["backend", *(name for name in ("batch", "schema") if len(_values(rows, name)) > 1)]
    about += [f"{name} {_values(rows, name)[0]}" for name in ("batch", "schema") if name not in shown and rows]
    lines = ["", ", ".join(about), "", _cells(shown, {name: name for name in shown}) + _HEAD]
    last: dict = {}
    for row in rows:
        labels = {name: row[name] or "" for name in shown}
        lines.append(_cells(shown, labels if labels != last else {}) + _figures(row, _unguided(report, row)))
        last = labels
    lines += [f"{one['backend']} refused {one['schema']}: {one['reason']}" for one in report["refused"]]
    for backend, engine in report["engines"].items():
        lines += [f"{backend}: the engine failed"] if engine["failed"] else []
    lines += reports.not_applied(report["engines"])
    if report["what"] == "guided":
        lines += _as_first_reported(report) + _where_the_time_goes(report)
    equal = all(row["equal"] for row in rows)
    return "\n".join([*lines, "", "All token ids are equal." if equal else "TOKEN IDS DIFFER: please report this."])


_WIDTHS = {"backend": 10, "batch": 6, "schema": 10}
_HEAD = f"{'run':12} {'stock':>8} {'patched':>8} {'ratio':>6} {'':13} {'of unguided':>11}  token ids"


def _values(rows: list, name: str) -> list:
    return list(dict.fromkeys(row[name] for row in rows if row[name] is not None and row["timed"]))


def _cells(shown: list, labels: dict) -> str:
    return "".join(f"{labels.get(name, ''):<{_WIDTHS[name]}} " for name in shown)


def _unguided(report: dict, row: dict) -> float | None:
    """What the patched engine does without a grammar, in the batch of this row."""
    same = (one for one in report["rows"] if (one["backend"], one["batch"]) == (row["backend"], row["batch"]))
    return next((one["patched"] for one in same if one["name"] == "unguided"), None)


def _figures(row: dict, unguided: float | None) -> str:
    ids = f"{'equal' if row['equal'] else 'DIFFER'} ({row['tokens']:,})"
    if not row["timed"]:
        return f"{row['name']:12} {'':50} {ids}"
    spread = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}" if len(row["ratios"]) > 1 else ""
    share = f"{row['patched'] / unguided:.2f}" if unguided and row["name"] != "unguided" else ""
    figures = f"{row['stock']:8.0f} {row['patched']:8.0f} {row['ratio']:6.2f} {spread:13} {share:>11}"
    return f"{row['name']:12} {figures}  {ids}"


def _as_first_reported(report: dict) -> list:
    """No cache, cold and warm, as the mask cache was first reported: the three rates that a user can compare."""
    lines = ["", f"{'':36}{'no cache':>9}{'cold':>9}{'':>7}{'warm':>9}"]
    found = {(row["backend"], row["schema"], row["batch"], row["name"]): row for row in report["rows"]}
    for (backend, schema, batch, name), row in found.items():
        cold = found.get((backend, schema, batch, "cold"))
        if name == "warm":
            first = f"{cold['patched']:9.0f} x{cold['patched'] / row['stock']:5.2f}" if cold else f"{'-':>9}{'':7}"
            rates = f"{row['stock']:9.0f}{first}{row['patched']:9.0f} x{row['patched'] / row['stock']:5.2f}"
            lines.append(f"{f'{backend}, {schema}, batch {batch}':36}{rates}")
    return lines if len(lines) > 2 else []


def _where_the_time_goes(report: dict) -> list:
    if not report["stages"]:
        return []
    lines = ["", f"{'ms a step':44}" + "".join(f"{stage:>9}" for stage in STAGES) + f"{'sum':>9}"]
    for one in report["stages"]:
        for side in ("stock", "patched"):
            label = f"{one['backend']}, {one['schema']}, batch {one['batch']}" if side == "stock" else ""
            times = [one[side][stage] for stage in STAGES]
            lines.append(f"{label:36}{side:8}" + "".join(f"{value:9.2f}" for value in [*times, sum(times)]))
    return lines
