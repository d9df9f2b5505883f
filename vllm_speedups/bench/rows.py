"""`vllm-speedups bench rows`: the time to fill a row, stock and patched, over built-in grammars or a folder of schemas.

In the manner of MaskBench, yet through vLLM's own backend classes, without a model: the outputs of a grammar go on together,
a token at a time, as the requests of a batch do. Every patched row is compared with stock's. A folder holds JSON files, each
a schema or `{"schema": ..., "tests": [{"data": ..., "valid": true}]}`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from vllm_speedups import telemetry

from . import report as reports

PATCHES = {"xgrammar": "xgrammar-states", "guidance": "guidance-history", "outlines": "outlines-states"}
CLASSES = {
    "xgrammar": ("XgrammarBackend", "XgrammarGrammar"),
    "guidance": ("GuidanceBackend", "GuidanceGrammar"),
    "outlines": ("OutlinesBackend", "OutlinesGrammar"),
}
PHASES = ("stock", "cold", "new", "warm")


class NotPatched(RuntimeError):
    """Raised where a patch is not applied to this vLLM, with the reason."""


def _object(properties: dict) -> str:
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    )


def _forbidding(text: str) -> str:
    """An EBNF of any text without `text`, then an end mark: a rule for each prefix of it, as in xgrammar issue 873."""

    def after(prefix: str) -> int:
        return next(n for n in range(len(prefix), -1, -1) if prefix.endswith(text[:n]))

    rules = ['root ::= s0 "<end>"']
    for known in range(len(text)):
        told = sorted(set(text[: known + 1]))
        others = "".join(f"\\x{ord(c):02x}" for c in told)
        choices = ['""', f"[^{others}] s0"]
        for character in told:
            state = after(text[:known] + character)
            if state < len(text):
                choices.append(f'"{character}" s{state}')
        rules.append(f"s{known} ::= {' | '.join(choices)}")
    return "\n".join(rules)


BUILT_IN = {
    "bounded strings": (
        "JSON",
        _object(
            {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 2, "maxItems": 3},
            }
        ),
    ),
    "any object": ("JSON_OBJECT", '{"type": "object"}'),
    "maxLength 100000 (xgrammar 852)": ("JSON", _object({"content": {"type": "string", "maxLength": 100_000}})),
    "maxLength 512 (xgrammar 852)": ("JSON", _object({"content": {"type": "string", "maxLength": 512}})),
    "minLength 200 (xgrammar 805)": ("JSON", _object({"content": {"type": "string", "minLength": 200}})),
    "text without a mark (xgrammar 873)": ("GRAMMAR", _forbidding("</think><deadbeef>")),
    "words and spaces (vllm 14962)": (
        "GRAMMAR",
        "root ::= en-char+ ([ \\t\\n] en-char+)*\nen-char ::= [0-9a-zA-Z!\"#$%&'()*+,./:;<=>?@[\\\\\\]^_`{|}~]",
    ),
    "arithmetic": ("GRAMMAR", 'root ::= e\ne ::= t ("+" t)*\nt ::= f ("*" f)*\nf ::= [0-9]+ | "(" e ")"'),
    "ambiguous arithmetic": (
        "GRAMMAR",
        'root ::= e\ne ::= f ("+" e)? | "(" e ")" ("*" e)?\nf ::= [0-9]+ | f2\nf2 ::= [0-9]+ "."? | "(" e ")"',
    ),
    "a regular expression": ("REGEX", "(\\+[0-9]{1,3} )?[0-9]{3}-[0-9]{4}( ext [a-z]{1,12})?"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends", type=reports.numbers(str), default=list(PATCHES), help="of " + ",".join(PATCHES) + " (all)"
    )
    parser.add_argument("--schemas", type=Path, help="a folder of JSON files, in place of the built-in grammars")
    parser.add_argument("--limit", type=int, default=50, help="files read from the folder (50)")
    parser.add_argument("--only", default="", help="only grammars whose name contains this")
    parser.add_argument("--outputs", type=int, default=16, help="outputs a grammar (16)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens an output (64)")
    parser.add_argument("--no-whitespace", action="store_true", help="as with disable_any_whitespace")
    reports.add_arguments(parser)


def main(argv: list | None = None) -> int:
    parser = argparse.ArgumentParser(prog="vllm-speedups bench rows", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Measure and print. 1: a patch is not applied or a row was wrong; 2: an option makes no sense; else 0."""
    try:
        reports.check(args.backends, PATCHES, limit=args.limit, outputs=args.outputs, tokens=args.tokens)
    except reports.Unusable as error:
        print(f"bench rows: {error}", file=sys.stderr)
        return 2
    results, wrong = [], 0
    cases = (
        _folder(args.schemas, args.limit) if args.schemas else {name: (*case, None) for name, case in BUILT_IN.items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        for backend in args.backends:
            try:
                bench = Bench(backend, Path(folder), args.no_whitespace)
            except NotPatched as error:
                print(f"bench rows: {error}", file=sys.stderr)
                return 1
            for name, (kind, specification, instances) in cases.items():
                if args.only not in name:
                    continue
                result = bench.measure(kind, specification, instances, args.outputs, args.tokens)
                wrong += result.get("wrong", 0)
                results.append({"backend": backend, "grammar": name, **result})
                reports.say(f"  {backend}: {name}")
    reports.finish(args, reports.make("rows", args, rows=results), table)
    if any("timed out" in result.get("refused", "") for result in results):
        # vLLM gave up that compilation, its thread did not: an orderly end would wait for it, for minutes.
        sys.stdout.flush()
        os._exit(1 if wrong else 0)
    return 1 if wrong else 0


def _folder(folder: Path, limit: int) -> dict:
    cases = {}
    for file in sorted(folder.glob("*.json"))[:limit]:
        content = json.loads(file.read_text())
        tests = content.get("tests") if "schema" in content else None
        instances = [json.dumps(test["data"]) for test in tests or () if test.get("valid")]
        cases[file.stem] = ("JSON", json.dumps(content.get("schema", content)), instances or None)
    return cases


class Bench:
    """One backend of the installed vLLM, with stock's and the patch's methods side by side."""

    def __init__(self, backend: str, folder: Path, no_whitespace: bool):
        import importlib

        # A grammar that llguidance gives up on is no news here: stock gives up on it too.
        os.environ.setdefault("LLGUIDANCE_LOG_LEVEL", "0")
        from vllm.tokenizers import get_tokenizer

        from vllm_speedups import plugin

        from .models import VOCAB_SIZE, build_model

        plugin.register()
        patch = next((patch for patch in plugin.patches() if patch.name == PATCHES[backend]), None)
        module = importlib.import_module(f"vllm.v1.structured_output.backend_{backend}")
        if patch is None or not patch.prove():
            raise NotPatched(f"{PATCHES[backend]} is off: {patch.reason if patch else 'no such patch'}")
        self.patch, self.names = patch, [f"{module.__name__}:{name}" for name in CLASSES[backend]]
        self.size, self.grammar_class = VOCAB_SIZE, getattr(module, CLASSES[backend][1])
        if not (folder / "tekken.json").exists():
            build_model(folder)
        self.tokenizer = get_tokenizer(str(folder), tokenizer_mode="mistral")
        options = SimpleNamespace(disable_any_whitespace=no_whitespace, disable_additional_properties=False)
        config = SimpleNamespace(structured_outputs_config=options, model_config=None, speculative_config=None)
        self.backend = getattr(module, CLASSES[backend][0])(config, tokenizer=self.tokenizer, vocab_size=VOCAB_SIZE)
        self.mask = self.backend.allocate_token_bitmask(2)
        words = [self.tokenizer.decode([token]) for token in range(VOCAB_SIZE)]
        self.letters = np.array([word.isalpha() and len(word) < 9 for word in words])

    def _method(self, name: str, patched: bool):
        path = f"{self.names[0 if name == 'compile_grammar' else 1]}.{name}"
        stock = self.patch.stock.get(path) or getattr(self.grammar_class, name)
        return self.patch.replacements.get(path, stock) if patched else stock

    def measure(self, kind: str, specification: str, instances: list | None, outputs: int, tokens: int) -> dict:
        """Microseconds a row in each phase, and seconds to compile; or why the backend refused the grammar."""
        from vllm.v1.structured_output.backend_types import StructuredOutputOptions

        self._arguments = (self.backend, getattr(StructuredOutputOptions, kind), specification)
        try:
            start = time.perf_counter()
            self._method("compile_grammar", False)(*self._arguments)
            compiled = time.perf_counter() - start
        except Exception as error:
            return {"refused": str(error)[:80]}
        times: dict = {phase: [] for phase in PHASES}
        accepts: dict = {phase: [] for phase in PHASES}
        given = [self.tokenizer.encode(instance, add_special_tokens=False) for instance in instances or ()]
        paths, wrong = self._walk_stock(times["stock"], accepts["stock"], given, outputs, tokens), 0
        half = len(paths) // 2
        for phase, chosen, learnt in (
            ("cold", paths[:half], ()),
            ("new", paths[half:], paths[:half]),
            ("warm", paths, paths),
        ):
            wrong += self._learn(learnt)
            wrong += self._replay(chosen, times[phase], accepts[phase])
        summary = {phase: _quantiles(times[phase]) for phase in PHASES}
        medians = [float(np.median(accepts[phase])) for phase in ("stock", "warm") if accepts[phase]]
        tracking = 1e6 * (medians[1] - medians[0]) if len(medians) == 2 else 0.0
        return {"rows": len(times["stock"]), "compile_s": compiled, "wrong": wrong, "accept_us": tracking, **summary}

    def _compiled(self, patched: bool, count: int) -> list:
        return [self._method("compile_grammar", patched)(*self._arguments) for _ in range(count)]

    def _walk_stock(self, fills: list, accepts: list, given: list, outputs: int, tokens: int) -> list:
        """Lists of (token, the row before it), one an output; random ones where none are given."""
        walks = [
            self._walk(grammar, fills, accepts, random.Random(number), given[number % len(given)] if given else None, tokens)
            for number, grammar in enumerate(self._compiled(False, outputs))
        ]
        paths: list = [[] for _ in walks]
        for step in itertools.zip_longest(*walks):
            for path, taken in zip(paths, step):
                path += [taken] if taken else []
        return paths

    def _walk(self, grammar, fills: list, accepts: list, random_: random.Random, given: list | None, tokens: int) -> Iterator:
        """Yields (token, the row before it) of one output by stock."""
        fill, accept, mask = self._method("fill_bitmask", False), self._method("accept_tokens", False), self.mask
        for step in range(len(given) if given else tokens):
            start = time.perf_counter()
            fill(grammar, mask, 1)
            fills.append(time.perf_counter() - start)
            row = mask.numpy()[1].copy()
            allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[: self.size].astype(bool)
            if given:
                token = given[step]
            else:
                liked = np.flatnonzero(allowed & self.letters)
                liked = liked if len(liked) and random_.random() < 0.8 else np.flatnonzero(allowed)
                if not len(liked):
                    return
                token = int(liked[random_.randrange(len(liked))])
            start = time.perf_counter()
            accepted = accept(grammar, "bench", [token])
            seconds = time.perf_counter() - start
            yield token, row
            if not accepted or grammar.is_terminated():
                return
            accepts.append(seconds)

    def _replay(self, paths: Sequence, fills: list, accepts: list) -> int:
        """How many rows of patched matchers differ from stock's along the same outputs."""
        grammars, mask, wrong = self._compiled(True, len(paths)), self.mask, 0
        fill, accept = self._method("fill_bitmask", True), self._method("accept_tokens", True)
        self._last = grammars[-1] if grammars else None
        for step in itertools.zip_longest(*paths):
            for grammar, taken in zip(grammars, step):
                if taken is None:
                    continue
                token, row = taken
                start = time.perf_counter()
                fill(grammar, mask, 1)
                fills.append(time.perf_counter() - start)
                wrong += not np.array_equal(mask.numpy()[1], row)
                start = time.perf_counter()
                accept(grammar, "bench", [token])
                accepts.append(time.perf_counter() - start)
        return wrong

    def _learn(self, paths: Sequence) -> int:
        """Replay outputs until nothing more is learnt from them. How many rows were wrong."""
        wrong, counts = 0, telemetry.counters(self.patch.name)
        deadline = time.monotonic() + 30
        while paths and time.monotonic() < deadline:
            before = counts["walks put off"]
            wrong += self._replay(paths, [], [])
            request = getattr(self._last, "_speedups", None)
            building = request is not None and request.grammar.fill_s == float("-inf")
            if building and request.grammar.network is None and not request.grammar.reason:
                time.sleep(0.01)
            elif counts["walks put off"] == before:
                break
            else:
                # Walking is kept to a share of the time that passes.
                time.sleep(0.05)
        return wrong


def _quantiles(seconds: list) -> dict | None:
    if not seconds:
        return None
    values = 1e6 * np.array(seconds)
    return {"avg": float(values.mean()), **{f"p{q:g}": float(np.percentile(values, q)) for q in (50, 99, 99.9)}}


def table(report: dict) -> str:
    """The report as text: average and 99th percentile of every phase; the report holds more."""
    options = report["options"]
    lines = [
        f"{reports.heading(report)}; {options['outputs']} outputs of {options['tokens']} tokens"
        + (", disable_any_whitespace" if options["no_whitespace"] else ""),
        "",
        f"{'us a row, average / p99':44}" + "".join(f"{phase:>16}" for phase in PHASES) + "   accept  wrong",
    ]
    for row in report["rows"]:
        name = f"{row['backend']}: {row['grammar']}"
        if "refused" in row:
            lines.append(f"{name:44} refused: {row['refused']}")
            continue
        cells = "".join(f"{_cell(row[phase]):>16}" for phase in PHASES)
        lines.append(f"{name:44}{cells}{row['accept_us']:9.2f} {row['wrong']:6d}")
    return "\n".join(lines)


def _cell(quantiles: dict | None) -> str:
    values = [quantiles[name] for name in ("avg", "p99")] if quantiles else []
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values) or "-"


if __name__ == "__main__":
    sys.exit(main())
