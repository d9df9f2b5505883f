"""`bench first` and `bench rows` without an engine: what their tables say, and options that make no sense."""

from __future__ import annotations

import pytest
import reports

from vllm_speedups import cli
from vllm_speedups.bench import first


def report(tokens: int, patches: dict, **more) -> dict:
    sides = {"stock": {"median": 30.0, "p90": 50.0}, "patched": {"median": 20.0, "p90": 40.0}}
    return {
        "what": "first",
        "command": "vllm-speedups bench first",
        "machine": reports.MACHINE,
        "options": {"schemas": 24, "batch": 64, "tokens": tokens},
        "rows": [{"backend": "xgrammar", "tokens": 1234, "equal": True, "ratio": 1.5, **sides, **more}],
        "engines": {"xgrammar": {"patches": patches}},
    }


def test_the_table_says_what_was_asked_and_what_was_off():
    text = first.table(report(64, {"grammar-masks": "disabled", "xgrammar-states": "applied", "fsm-masks": "not meant"}))
    assert "; 64 tokens of 64 with a grammar never seen, ms" in text and "over 24 schemas" in text
    assert "1.50  equal (1,234)" in text and text.endswith("\nnot applied: grammar-masks (disabled)")


def test_the_table_says_where_ids_differ():
    text = first.table(report(1, {}, equal=False))
    assert "; first token of 64 with" in text and "1.50  DIFFERENT (1,234)" in text and "not applied" not in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("first --backends lmfe", "bench first: --backends: lmfe; known are outlines, xgrammar, guidance"),
        ("first --backends=", "bench first: --backends: none given; known are outlines, xgrammar, guidance"),
        ("first --schemas 3", "bench first: --schemas must be 4 or more"),
        ("first --batch 0", "bench first: --batch must be 1 or more"),
        ("first --tokens 0", "bench first: --tokens must be 1 or more"),
        ("rows --backends lmfe", "bench rows: --backends: lmfe; known are xgrammar, guidance, outlines"),
        ("rows --outputs 0", "bench rows: --outputs must be 1 or more"),
    ],
)
def test_an_option_that_makes_no_sense_is_one_line(capsys, words, told):
    assert cli.main(["bench", *words.split()]) == 2
    assert capsys.readouterr().err.splitlines() == [told]
