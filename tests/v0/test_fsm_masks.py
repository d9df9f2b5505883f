"""`fsm-masks` beside stock's processors, on the release's own code, over the same histories and logits."""

from __future__ import annotations

import copy
import importlib
import pickle
import random
import sys
import threading
from collections import defaultdict

import pytest
import torch
from processors import DTYPES, REGEXES, TOKENIZER, Tokenizer, following, outcome, same, scores

from vllm_speedups.masks import bias
from vllm_speedups.patches import fsm_masks as glue
from vllm_speedups.patching import Context, Declined
from vllm_speedups.patching.targets import resolve
from vllm_speedups.plugin import discover

PATCH = next(patch for patch in discover() if patch.name == "fsm-masks")
PATCH.check()
outlines_processors = importlib.import_module(next(iter(PATCH.form.targets)).partition(":")[0])
STOCK = {path: resolve(path) for path in PATCH.form.targets}
CALL = next(path for path in STOCK if path.endswith(glue.CALL))
COMPILE = next((path for path in STOCK if path.endswith(glue.COMPILE)), None)
SHAPE = glue.SHAPES[PATCH.form.name]
EOS, WIDTH = TOKENIZER.eos_token_id, len(TOKENIZER)


def installed(stock: dict = STOCK) -> tuple:
    """The replacement of `__call__`, that of `_get_guide` if there is one, and the errors that they report."""
    failures: list = []
    replacements = glue.build(Context(PATCH.form.name, stock, failures.append))
    return replacements[CALL], replacements.get(COMPILE), failures


def processor(kind: str, specification: str, reasoner=None):
    """A processor as vLLM makes it."""
    made = getattr(outlines_processors, f"{kind}LogitsProcessor")
    made = made(specification, TOKENIZER, reasoner) if SHAPE.content else made(specification, TOKENIZER)
    if SHAPE.restart:
        # As the release's `outlines_decoding` does with the copy that each request gets.
        made = copy.copy(made)
        made.init_state()
    return made


@pytest.fixture(scope="module")
def made() -> dict:
    """A processor for each regular expression, to be copied."""
    return {regex: processor("Regex", regex) for regex in REGEXES}


def pair(original) -> tuple:
    """Two processors of one guide, with histories of their own: one for stock, one for us."""
    both = copy.copy(original), copy.copy(original)
    for each in both:
        setattr(each, SHAPE.states, defaultdict(int))
    return both


def compare(ours, both: tuple, history, row: torch.Tensor):
    """Stock and ours on one history and row: the same outcome, the same tensor returned, the same states. Ours' outcome."""
    rows = row.clone(), row.clone()
    expected, got = (outcome(call, each, history, own) for call, each, own in zip((STOCK[CALL], ours), both, rows))
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), got
        assert same(expected, got), (history, row.dtype)
        assert got is rows[1] and expected is rows[0]
    else:
        assert got == expected
    assert getattr(both[0], SHAPE.states) == getattr(both[1], SHAPE.states)
    return got


@pytest.mark.parametrize("seed", range(8))
def test_logits_end_as_stock_leaves_them(made, seed):
    ours, _, failures = installed()
    chooser = random.Random(seed)
    pairs = [pair(made[regex]) for regex in REGEXES for _ in range(2)]
    widths = WIDTH, WIDTH + chooser.choice((7, 3000))
    for _ in range(2):
        batch = [(both, [[]]) for both in pairs]
        for _ in range(14):
            for both, histories in batch:
                if chooser.random() < 0.1:
                    histories.append(list(chooser.choice(histories)))
                for number, history in enumerate(histories):
                    given = tuple(history) if chooser.random() < 0.5 else history
                    row = scores(chooser, chooser.choice(widths), chooser.choice(DTYPES))
                    got = compare(ours, both, given, row)
                    histories[number] = following(chooser, history, got, EOS)
    assert not failures


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH - 300])
def test_tokens_without_a_logit_are_treated_as_stock_treats_them(made, width):
    ours, _, failures = installed()
    chooser = random.Random(width)
    for regex in REGEXES:
        both, history = pair(made[regex]), []
        for _ in range(6):
            got = compare(ours, both, history, scores(chooser, width, torch.float32))
            history = following(chooser, history, got, EOS)
    assert not failures


def test_an_unknown_history_begins_where_stock_lets_it_begin(made):
    ours, _, failures = installed()
    chooser = random.Random(0)
    for regex in REGEXES:
        both = pair(made[regex])
        for history in ([5, 6, 7], [5, 6, 7, 8], [], [EOS], [EOS, EOS], [5, 6]):
            compare(ours, both, history, scores(chooser, WIDTH, torch.float32))
    assert not failures


def test_masks_are_shared_by_all_requests_of_a_guide_and_by_its_pickled_copies(made):
    ours, _, failures = installed()
    made_again = []
    original = made[REGEXES[1]]
    both = pair(original)
    guide = getattr(original, SHAPE.guide)
    compare(ours, both, [], torch.zeros(WIDTH))

    listing = "get_next_instruction" if hasattr(guide, "get_next_instruction") else "allowed_token_ids"
    for other in (copy.copy(original), pickle.loads(pickle.dumps(original))):
        setattr(other, SHAPE.states, defaultdict(int))
        twin = getattr(other, SHAPE.guide)
        setattr(twin, listing, lambda state: made_again.append(state))
        try:
            ours(other, [], torch.zeros(WIDTH))
        finally:
            twin.__dict__.pop(listing)
    assert not made_again and not failures


def test_equal_masks_of_many_states_are_kept_once(made, environ):
    ours, _, _ = installed()
    cache = next(cell.cell_contents for cell in ours.__closure__ if type(cell.cell_contents).__name__ == "StateCache")
    both, history = pair(made[REGEXES[0]]), []
    for _ in range(11):
        ours(both[1], history, torch.zeros(WIDTH))
        history = [*history, TOKENIZER.get_vocab()["a"]]
    # Eleven states; the last of them allows no pair of letters any more, if it comes to that.
    states = next(iter(cache._held.values())).biases
    assert len(states) == 11 and len({id(form) for form in states.values()}) <= 2


@pytest.mark.parametrize("megabytes", ["0", "0.01"])
def test_a_small_budget_costs_no_bit(made, environ, megabytes):
    environ.setenv("VLLM_SPEEDUPS_MASK_CACHE_MB", megabytes)
    ours, _, failures = installed()
    chooser = random.Random(1)
    for regex in REGEXES:
        both, history = pair(made[regex]), []
        for _ in range(12):
            got = compare(ours, both, history, scores(chooser, WIDTH, torch.float32))
            history = following(chooser, history, got, EOS)
    assert not failures


def test_grammars_are_stocks():
    ours, _, failures = installed()
    grammar = 'start: "a" [start] "b"'
    stocks, own = processor("CFG", grammar), processor("CFG", grammar)
    history = []
    letters = TOKENIZER.get_vocab()
    for letter in "aabb":
        rows = torch.zeros(WIDTH), torch.zeros(WIDTH)
        expected, got = outcome(STOCK[CALL], stocks, history, rows[0]), outcome(ours, own, history, rows[1])
        assert same(*rows)
        # In some releases these guides do not run with the parser that they ask for.
        assert got is rows[1] if expected is rows[0] else got == expected
        history = [*history, letters[letter]]
    assert not failures


def test_rows_that_are_no_rows_of_floats_are_stocks(made):
    ours, _, failures = installed()
    both = pair(made[REGEXES[0]])
    for row in (torch.zeros(WIDTH, dtype=torch.int64), torch.zeros(1, WIDTH), torch.zeros(2 * WIDTH)[::2]):
        rows = row.clone() if row.stride(-1) == 1 else row, row.clone()
        expected, got = outcome(STOCK[CALL], both[0], [], rows[0]), outcome(ours, both[1], [], rows[1])
        assert got == expected if isinstance(expected, tuple) else torch.equal(got, expected)
    assert not failures


def test_biases_made_in_inference_mode_serve_outside_of_it(made):
    ours, _, failures = installed()
    both = pair(made[REGEXES[3]])
    with torch.inference_mode():
        compare(ours, both, [], torch.zeros(WIDTH))
    compare(ours, both, [], torch.zeros(WIDTH))
    assert not failures


def test_processors_in_threads_answer_as_one_by_one(made):
    ours, _, failures = installed()
    originals = {regex: pair(original)[1] for regex, original in made.items()}
    wrong: list = []

    def work(seed: int) -> None:
        chooser = random.Random(seed)
        regex = REGEXES[seed % len(REGEXES)]
        both = pair(originals[regex])
        history = []
        for _ in range(40):
            row = scores(chooser, WIDTH, torch.float32)
            own = row.clone()
            expected, got = outcome(STOCK[CALL], both[0], history, row), outcome(ours, both[1], history, own)
            if not (same(row, own) and isinstance(got, torch.Tensor) == isinstance(expected, torch.Tensor)):
                wrong.append((seed, history))
            history = following(chooser, history, got, EOS)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not failures


@pytest.mark.skipif(not SHAPE.content, reason="no reasoner in this release")
def test_reasoning_is_left_alone_and_left_out():
    class Reasoner:
        def is_reasoning_end(self, ids):
            return 1 in ids

        def content(self, ids):
            return ids[ids.index(1) + 1 :]

    setattr(Reasoner, SHAPE.content, Reasoner.content)
    ours, _, failures = installed()
    both = pair(processor("Regex", REGEXES[2], Reasoner()))
    chooser, letters = random.Random(0), TOKENIZER.get_vocab()
    for history in ([], [5], [5, 1], [5, 1, letters["ma"]], [5, 1, letters["ma"], letters["y"]]):
        compare(ours, both, history, scores(chooser, WIDTH, torch.float32))
    assert not failures


@pytest.mark.skipif(not hasattr(outlines_processors.BaseLogitsProcessor, "clone"), reason="no clones in this release")
def test_clones_go_on_where_stocks_do(made):
    ours, _, failures = installed()
    both, history = pair(made[REGEXES[1]]), []
    chooser = random.Random(0)
    for _ in range(6):
        got = compare(ours, both, history, scores(chooser, WIDTH, torch.float32))
        history = following(chooser, history, got, EOS)
        both = tuple(each.clone() for each in both)
    assert not failures


def test_a_mask_that_cannot_be_made_is_stocks_and_reported(made, monkeypatch):
    ours, _, failures = installed()

    def broken(*_):
        raise RuntimeError("no bias")

    monkeypatch.setattr(bias, "build", broken)
    both = pair(made[REGEXES[2]])
    compare(ours, both, [], torch.zeros(WIDTH))
    assert [str(error) for error in failures] == ["no bias"]


def test_a_wrong_mask_is_noticed_when_it_is_verified_and_stocks_logits_come_out(made, monkeypatch):
    differences: list = []
    context = Context(
        PATCH.form.name,
        STOCK,
        failed=lambda error: pytest.fail(repr(error)),
        verifies=lambda: True,
        differed=lambda facts, private: differences.append((facts, private)),
    )
    ours = glue.build(context)[CALL]
    chooser, build = random.Random(3), bias.build
    for regex in REGEXES:
        both, history = pair(made[regex]), []
        for _ in range(8):
            got = compare(ours, both, history, scores(chooser, WIDTH, torch.float32))
            history = following(chooser, history, got, EOS)
    assert differences == []

    def corrupted(allowed, *kind):
        allowed[7] = not allowed[7]
        return build(allowed, *kind)

    monkeypatch.setattr(bias, "build", corrupted)
    ours = glue.build(context)[CALL]
    compare(ours, pair(made[REGEXES[0]]), [], torch.zeros(WIDTH))
    ((facts, private),) = differences
    assert facts["first that differs"] == 7 and private == {"tokens": []}


@pytest.mark.skipif(COMPILE is None, reason="this release keeps compiled guides itself")
class TestCompiling:
    """`_get_guide`: one guide for all who ask for the same."""

    def compiling(self, compiled: list, wait=lambda: None):
        """A replacement over a stock that notes what it compiles."""

        def stock(cls, regex, tokenizer):
            compiled.append(regex)
            wait()
            return STOCK[COMPILE].__func__(cls, regex, tokenizer)

        _, ours, failures = installed({**STOCK, COMPILE: classmethod(stock)})
        return lambda *arguments: ours.__func__(outlines_processors.RegexLogitsProcessor, *arguments), failures

    def test_a_guide_is_compiled_once_for_a_tokenizer(self):
        compiled: list = []
        ours, failures = self.compiling(compiled)
        other = Tokenizer()
        guides = [ours(regex, tokenizer) for tokenizer in (TOKENIZER, other) for regex in ("a|b", "c", "a|b")]
        assert compiled == ["a|b", "c", "a|b", "c"] and not failures
        assert guides[0] is guides[2] and guides[3] is guides[5] and guides[0] is not guides[3]

    def test_threads_that_ask_at_once_wait_for_one_compilation(self):
        compiled, all_ask = [], threading.Event()
        ours, _ = self.compiling(compiled, lambda: all_ask.wait(30))
        guides: list = []
        threads = [threading.Thread(target=lambda: guides.append(ours("[ab]+", TOKENIZER))) for _ in range(4)]
        for thread in threads:
            thread.start()
        all_ask.set()
        for thread in threads:
            thread.join()
        assert compiled == ["[ab]+"] and len(guides) == 4 and len(set(map(id, guides))) == 1

    def test_what_stock_raises_is_raised_each_time(self):
        compiled: list = []
        ours, failures = self.compiling(compiled)
        cls = outlines_processors.RegexLogitsProcessor
        expected = outcome(STOCK[COMPILE].__func__, cls, "(", TOKENIZER)
        assert isinstance(expected, tuple)
        assert [outcome(ours, "(", TOKENIZER) for _ in range(2)] == [expected] * 2
        assert compiled == ["(", "("] and not failures

    def test_without_a_budget_every_request_compiles(self, environ):
        environ.setenv("VLLM_SPEEDUPS_GUIDE_CACHE_MB", "0")
        compiled: list = []
        ours, _ = self.compiling(compiled)
        ours("a|b", TOKENIZER), ours("a|b", TOKENIZER)
        assert compiled == ["a|b", "a|b"]

    def test_a_guide_past_the_budget_is_shared_while_it_is_used(self, environ):
        environ.setenv("VLLM_SPEEDUPS_GUIDE_CACHE_MB", "0.000001")
        compiled: list = []
        ours, _ = self.compiling(compiled)
        guide = ours("[a-z]{0,30}", TOKENIZER)
        assert ours("[a-z]{0,30}", TOKENIZER) is guide
        del guide
        ours("[a-z]{0,30}", TOKENIZER)
        assert len(compiled) == 2


def test_the_probe_passes_on_the_real_thing_and_tells_a_wrong_one():
    failures: list = []
    context = Context(PATCH.form.name, STOCK, failures.append)
    replacements = glue.build(context)
    glue.probe(context, replacements)
    assert not failures

    def wrong(self, input_ids, scores):
        STOCK[CALL](self, input_ids, scores)
        scores[0] = 0.5
        return scores

    with pytest.raises(Declined, match="other logits"):
        glue.probe(context, {**replacements, CALL: wrong})


def test_the_patch_goes_into_the_release_and_out_again():
    base = outlines_processors.BaseLogitsProcessor
    patch = next(patch for patch in discover() if patch.name == "fsm-masks")
    patch.check()
    patch.install(prove=True)
    try:
        assert patch.live, patch.reason
        both = processor("Regex", "(left|right)"), processor("Regex", "(left|right)")
        rows = torch.zeros(WIDTH), torch.zeros(WIDTH)
        both[0]([], rows[0])
        assert sys.modules["vllm_speedups.telemetry"].snapshot()["fsm-masks"]["misses"]
    finally:
        patch.revert()
    both[1]([], rows[1])
    assert torch.equal(*rows) and base.__dict__["__call__"] is STOCK[CALL]
