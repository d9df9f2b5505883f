"""`grammar-masks` beside the function that it replaces, on real vLLM, for whatever a step may bring."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

utils = pytest.importorskip("vllm.v1.structured_output.utils")

from matching import matched  # noqa: E402

from vllm_speedups import settings  # noqa: E402
from vllm_speedups.masks import cuda  # noqa: E402
from vllm_speedups.masks.kernels import mask_rows  # noqa: E402
from vllm_speedups.masks.lanes import Lane  # noqa: E402
from vllm_speedups.masks.resident import ResidentMasks  # noqa: E402
from vllm_speedups.patches import grammar_masks as glue  # noqa: E402
from vllm_speedups.patching import Context, Declined  # noqa: E402

STOCK = utils.apply_grammar_bitmask
FORM = matched("grammar-masks")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore:The bitmask covers only")


def installed(stock=STOCK, form: str = FORM) -> tuple:
    """The replacement, and the errors that it reports."""
    failures: list = []
    context = Context(form, {glue.TARGET: stock}, failures.append)
    return context, glue.build(context), failures


@st.composite
def steps(draw):
    """A step: requests in the worker's order and the scheduler's, speculative tokens, rows and logits."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch = [f"r{i}" for i in range(draw(st.integers(1, 6)))]
    known = [*batch, "gone", "left"]
    spec = {req: [1] * draw(st.integers(1, 3)) for req in known if draw(st.booleans())}
    # Where rows stand at a stride, stock divides by the number of guided requests, and is not called without any.
    guided = draw(st.lists(st.sampled_from(known), unique=True, min_size=FORM == glue.STRIDED))
    words = draw(st.integers(1, 4))
    # Whole words, or past the rows: where logits end inside of a word, xgrammar 0.2.8 may write past them.
    width = draw(st.sampled_from([*range(32, words * 32, 32), *range(words * 32, words * 32 + 40)]))
    count = sum(1 + len(spec.get(req, ())) for req in guided)
    if FORM == glue.STRIDED:
        count = len(guided) * (1 + max((len(spec.get(req, ())) for req in guided), default=0))
    pool = [np.full(words, -1), np.zeros(words), *random.integers(-(2**31), 2**31, (3, words))]
    pool[3][: words // 2] = -1
    rows = np.array([pool[i] for i in random.integers(0, len(pool), count)]).astype(np.int32).reshape(count, words)
    total = sum(1 + len(spec.get(req, ())) for req in batch)
    values = random.choice([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, 7e4], (total, width)) + random.standard_normal(
        (total, width)
    )
    arguments = (
        SimpleNamespace(scheduled_spec_decode_tokens=spec),
        SimpleNamespace(grammar_bitmask=rows, structured_output_request_ids=guided),
        SimpleNamespace(req_ids=batch),
    )
    return arguments, torch.from_numpy(values).to(draw(st.sampled_from(DTYPES)))


@given(st.lists(steps(), min_size=1, max_size=4))
@hypothesis_settings(max_examples=150, deadline=None)
def test_logits_end_as_stock_leaves_them(batches):
    _, replacements, failures = installed()
    for arguments, logits in batches * 2:
        expected, got, rows = logits.clone(), logits.clone(), arguments[1].grammar_bitmask.copy()
        assert STOCK(*arguments, expected) is None
        assert replacements[glue.TARGET](*arguments, got) is None
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(got[~got.isnan()]), torch.signbit(expected[~expected.isnan()]))
        assert np.array_equal(arguments[1].grammar_bitmask, rows)
    assert not failures


@given(st.lists(steps(), min_size=1, max_size=4))
@hypothesis_settings(max_examples=60, deadline=None)
def test_logits_end_as_stock_leaves_them_where_masks_stay_on_the_device(batches):
    asked: list = []

    def stock(*arguments) -> None:
        asked.append(arguments)
        STOCK(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        # No CUDA device is here: the CPU stands for it, and the kernel in plain torch for the one in Triton.
        patch.setattr(settings, "_current", settings.Settings(cuda_masks=True))
        patch.setattr(glue, "usable", lambda logits: True)
        patch.setattr(cuda, "_resident", lambda *made: ResidentMasks(Lane(), mask_rows, *made))
        _, replacements, failures = installed(stock)
        for arguments, logits in batches * 2:
            # On the CPU stock may change which NaN a NaN of half precision is, and would be told apart.
            got = logits.float()
            expected, rows = got.clone(), arguments[1].grammar_bitmask.copy()
            STOCK(*arguments, expected)
            assert replacements[glue.TARGET](*arguments, got) is None
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
            assert np.array_equal(arguments[1].grammar_bitmask, rows)
    # The second round of the batches that have the width of the first is served without stock.
    width = batches[0][0][1].grammar_bitmask.shape[1]
    alike = sum(arguments[1].grammar_bitmask.shape[1] == width for arguments, _ in batches)
    assert len(asked) <= 2 * len(batches) - alike and not failures


def simple(rows=((2,),), guided=("a",), batch=("a",), spec=()) -> tuple:
    return (
        SimpleNamespace(scheduled_spec_decode_tokens=dict(spec)),
        SimpleNamespace(grammar_bitmask=np.array(rows, dtype=np.int32), structured_output_request_ids=list(guided)),
        SimpleNamespace(req_ids=list(batch)),
    )


def test_speculating_requests_take_a_row_for_every_token_they_may_emit():
    arguments = simple([[1], [2], [4], [8]], ["c", "a"], ["a", "b", "c"], {"c": [5, 5], "b": [5]})
    _, replacements, _ = installed(form="module function")
    logits = torch.zeros(6, 32)
    replacements[glue.TARGET](*arguments, logits)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert allowed == [[3], list(range(32)), list(range(32)), [0], [1], [2]]


def test_rows_may_stand_at_a_stride():
    _, replacements, failures = installed(form=glue.STRIDED)
    rows = [[1], [16], [16], [2], [4], [16]]
    logits = torch.zeros(4, 32)
    replacements[glue.TARGET](*simple(rows, ["a", "c"], ["b", "c", "a"], {"c": [5]}), logits)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert allowed == [list(range(32)), [1], [2], [0]] and not failures


def test_rows_of_requests_that_left_the_batch_are_skipped():
    _, replacements, failures = installed(form="module function")
    logits = torch.zeros(1, 32)
    replacements[glue.TARGET](*simple([[1], [2], [4]], ["left", "a"], ["a"], {"left": [5]}), logits)
    assert logits.isfinite().nonzero().tolist() == [[0, 2]] and not failures


@pytest.mark.parametrize("logits", [torch.zeros(1, 32, dtype=torch.float64), torch.zeros(1, 64)[:, ::2]])
def test_logits_that_are_not_supported_take_stocks_path(logits):
    seen = []
    _, replacements, failures = installed(lambda *arguments: seen.append(arguments))
    replacements[glue.TARGET](*simple(), logits)
    assert len(seen) == 1 and seen[0][3] is logits and not failures


def test_a_step_that_cannot_be_served_is_stocks_and_reported():
    seen = []
    _, replacements, failures = installed(lambda *arguments: seen.append(arguments))
    replacements[glue.TARGET](*simple(batch=("b", "a")), torch.zeros(1, 32))
    assert len(seen) == 1 and [type(error) for error in failures] == [IndexError]


def test_narrow_rows_are_shown_to_xgrammar_once_so_that_it_can_warn():
    seen = []
    _, replacements, _ = installed(lambda *arguments: seen.append(arguments))
    for _ in range(3):
        logits = torch.zeros(1, 50)
        replacements[glue.TARGET](*simple(), logits)
    assert len(seen) == 1 and logits.isfinite().sum() == 1 + 18


def test_the_probe_passes_on_the_real_thing_and_tells_a_wrong_one():
    context, replacements, failures = installed()
    glue.probe(context, replacements)
    assert not failures

    def wrong(scheduler_output, grammar_output, input_batch, logits):
        STOCK(scheduler_output, grammar_output, input_batch, logits)
        logits[1, 7] = 0

    with pytest.raises(Declined, match="other logits"):
        glue.probe(context, {glue.TARGET: wrong})
