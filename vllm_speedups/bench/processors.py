"""`vllm-speedups bench processors`: the outlines logits processors of V0 releases alone: no cache, cold and warm."""

from __future__ import annotations

import copy
import random
import string
import sys
import time
from statistics import median
from types import SimpleNamespace

from . import report as reports

PATCHES = ("fsm-masks", "outlines-integration")
TEXT = r'"[a-zA-Z0-9 .,]{0,16}"'
REGEX = r'\{"name":' + TEXT + r',"age":(0|[1-9][0-9]{0,2}),"tags":\[(' + TEXT + r"(," + TEXT + r"){0,2})?\]\}"


class Vocabulary:
    """A tokenizer, as far as outlines asks for one: characters, made-up words with and without a blank, and an end."""

    def __init__(self, size: int):
        chooser, texts = random.Random(0), dict.fromkeys(string.printable)
        while len(texts) < size - 1:
            word = "".join(chooser.choices(string.ascii_lowercase, k=chooser.randint(2, 7)))
            texts[word if chooser.random() < 0.5 else " " + word] = None
        self.eos_token, self.eos_token_id = "</s>", len(texts)
        self.all_special_tokens = [self.eos_token]
        self._texts = [*texts, self.eos_token]

    def get_vocab(self) -> dict:
        return {text: number for number, text in enumerate(self._texts)}

    def convert_tokens_to_string(self, tokens: list) -> str:
        return "".join(tokens)

    def decode(self, ids: list, **_) -> str:
        return "".join(self._texts[number] for number in ids)


def add_arguments(parser) -> None:
    """The arguments of `vllm-speedups bench processors`."""
    parser.add_argument("--vocab", type=int, default=50_257, help="tokens and logits (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=16, help="sequences in the batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens a sequence, at most (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the logits (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=5, help="interleaved rounds; medians are shown (default: %(default)s)"
    )
    reports.add_arguments(parser)


def run(options) -> int:
    """Measure and print. 0: all logits equal stock's; 1: some differ; 2: no such processors are installed."""
    results = [_measure(patch, options) for patch in _fitting()]
    if not results:
        print(
            "bench processors: no vLLM or outlines is installed whose logits processors fsm-masks or outlines-integration "
            "serves here: see docs/compatibility.md",
            file=sys.stderr,
        )
        return 2
    reports.finish(options, reports.make("processors", options, rows=results), table)
    return 0 if all(result["equal"] for result in results) else 1


def table(report: dict) -> str:
    """The report as text."""
    return "\n".join([reports.heading(report), "", *map(_text, report["rows"])])


def _fitting() -> list:
    """The patches that fit what is installed and whose stock runs on this machine, with their modules imported."""
    import importlib

    import torch

    from ..patching import VLLM, Declined
    from ..patching.engine import installed_version
    from ..plugin import discover

    found = []
    for patch in discover():
        package = patch.contract.package
        if patch.name not in PATCHES or (package != VLLM and not patch.contract.meant_for(installed_version(package))):
            continue
        try:
            patch.check()
        except Declined:
            continue
        if patch.form.name.endswith("pinned masks") and not torch.cuda.is_available():
            continue
        for path in patch.form.targets:
            importlib.import_module(path.partition(":")[0])
        found.append(patch)
    return found


def _measure(patch, options) -> dict:
    import importlib

    import torch

    from ..patching import Context
    from ..patching.targets import resolve

    glue = importlib.import_module(patch.glue)
    stock = {path: resolve(path) for path in patch.form.targets}
    call = next(path for path in stock if path.endswith("__call__"))
    module = sys.modules[call.partition(":")[0]]
    original = _processor(module, Vocabulary(options.vocab))
    histories = _histories(original, glue.SHAPES[patch.form.name].guide, options)
    rows = torch.randn(options.sequences, options.vocab, generator=torch.Generator().manual_seed(0))
    rows = rows.to(getattr(torch, options.dtype))
    tokens = sum(len(history) for history in histories)

    def timed(function) -> tuple:
        """Tokens a second, and the logits of the last token of every sequence."""
        own, last, spent = [copy.copy(original) for _ in histories], {}, 0.0
        for processor in own:
            for name, value in vars(processor).items():
                if name.endswith("fsm_state"):
                    setattr(processor, name, type(value)(int))
        for length in range(max(map(len, histories))):
            # Logits are made anew in every step.
            logits = rows.clone()
            start = time.perf_counter()
            for index, history in enumerate(histories):
                if length < len(history):
                    logits[index] = function(own[index], history[:length], logits[index])
                    last[index] = logits
            spent += time.perf_counter() - start
        return tokens / spent, [last[index][index].clone() for index in sorted(last)]

    rounds, equal, failures = [], True, []
    for _ in range(options.repeat):
        ours = glue.build(Context(patch.form.name, stock, failures.append))[call]
        results = [timed(function) for function in (stock[call], ours, ours)]
        rounds.append([speed for speed, _ in results])
        equal &= all(torch.equal(one, other) for _, logits in results[1:] for one, other in zip(results[0][1], logits))
    none, cold, warm = (median(speeds) for speeds in zip(*rounds))
    return {
        "package": patch.contract.package,
        "version": _version(patch.contract.package),
        "form": patch.form.name,
        "vocabulary": options.vocab,
        "sequences": options.sequences,
        "tokens": tokens,
        "dtype": options.dtype,
        "no_cache": none,
        "cold": cold,
        "warm": warm,
        "ratio": median(speeds[2] / speeds[0] for speeds in rounds),
        "equal": equal and not failures,
    }


def _version(package: str) -> str:
    from ..doctor import find_vllm
    from ..patching import VLLM
    from ..patching.engine import installed_version

    return (find_vllm() or {}).get("version") if package == VLLM else installed_version(package)


def _processor(module, tokenizer):
    """A processor as the release makes it."""
    from inspect import signature

    made = module.RegexLogitsProcessor
    asks = signature(made.__init__).parameters
    if "llm" in asks:
        # outlines' own: a model of vLLM, asked for its tokenizer in one way or another.
        made = made(
            REGEX, SimpleNamespace(get_tokenizer=lambda: tokenizer, tokenizer=SimpleNamespace(tokenizer=tokenizer))
        )
    else:
        made = made(REGEX, tokenizer, None) if "reasoner" in asks else made(REGEX, tokenizer)
    if hasattr(made, "init_state"):
        made.init_state()
    return made


def _histories(processor, attribute: str, options) -> list:
    """Random outputs that the guide allows, as lists of tokens."""
    guide, chooser = getattr(processor, attribute), random.Random(0)
    following = getattr(guide, "get_next_state", None) or guide.next_state

    def listed(state) -> list:
        if hasattr(guide, "allowed_token_ids"):
            return guide.allowed_token_ids(state)
        tokens = guide.get_next_instruction(state).tokens
        return tokens.tolist() if hasattr(tokens, "tolist") else tokens

    known, found = {}, []
    for _ in range(options.sequences):
        history, state = [], 0
        while len(history) < options.tokens:
            if state not in known:
                known[state] = listed(state)
            token = chooser.choice(known[state])
            history.append(token)
            if token == guide.eos_token_id if hasattr(guide, "eos_token_id") else token == int(guide.eos_tensor):
                break
            state = following(state, token)
        found.append(history)
    return found


def _text(result: dict) -> str:
    return (
        f"{result['package']} {result['version']} ({result['form']}), processors alone: vocabulary {result['vocabulary']:,}, "
        f"{result['sequences']} sequences, {result['tokens']:,} tokens, {result['dtype']}; tokens/s\n\n"
        f"    no cache  {result['no_cache']:10,.0f}\n    cold      {result['cold']:10,.0f}\n"
        f"    warm      {result['warm']:10,.0f}   {result['ratio']:.1f} times\n\n"
        f"All logits are {'equal' if result['equal'] else 'NOT equal'}."
    )
