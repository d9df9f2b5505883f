"""`bench guided`: its table, its options, its schemas; and its plots where matplotlib is installed."""

from __future__ import annotations

import argparse
import json

import pytest
import reports

from vllm_speedups.bench import demo, guided, schemas


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    guided.add_arguments(parser)
    return parser.parse_args(words)


def lines_with(text: str, *words: str) -> list:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_the_table_shows_medians_their_spread_and_the_share_of_unguided():
    text = guided.table(reports.guided())
    (warm,) = lines_with(text, "warm", "equal")
    assert warm.split() == ["warm", "550", "1200", "2.18", "2.00", "to", "3.00", "1.20", "equal", "(1,000)"]
    (greedy,) = lines_with(text, "greedy")
    assert greedy.split() == ["greedy", "equal", "(77)"]
    assert (
        "vLLM 0.32.0 on A Processor, 4 cores; 32 tokens, vocabulary 131,072, tokens/s, batch 64, schema bounded" in text
    )
    assert "All token ids are equal." in text


def test_the_table_shows_no_cache_cold_and_warm_as_first_reported():
    (line,) = lines_with(guided.table(reports.guided()), "xgrammar, bounded, batch 64", "x")[:1]
    assert line.replace("x ", "x").split()[-5:] == ["550", "750", "x1.36", "1200", "x2.18"]


def test_the_table_shows_where_a_step_s_time_goes():
    text = guided.table(reports.guided())
    (patched,) = [line for line in text.splitlines() if line.split()[:1] == ["patched"]]
    assert patched.split()[1:] == ["1.00", "0.25", *["1.00"] * 5, "6.25"]


def test_the_demo_s_table_is_the_first_part():
    text = guided.table(reports.guided("demo"))
    assert "no cache" not in text and "ms a step" not in text and "new outputs" in text


def test_columns_that_differ_are_shown_and_the_others_said_once():
    rows = [
        reports.row("warm", [1.0], [2.0], batch=batch, schema=schema) for batch in (64, 16) for schema in ("a", "b")
    ]
    text = guided.table(reports.guided(rows=rows))
    assert lines_with(text, "backend", "batch", "schema") and "tokens/s, batch" not in text
    assert [line.split()[1:3] for line in lines_with(text, "warm", "equal")] == [
        ["64", "a"],
        ["64", "b"],
        ["16", "a"],
        ["16", "b"],
    ]


def test_what_differs_was_refused_failed_or_not_applied_is_said():
    report = reports.guided(rows=[reports.row("warm", [1.0], [2.0], equal=False)])
    report["refused"] = [{"backend": "outlines", "schema": "recursive", "reason": "no recursion"}]
    report["engines"]["outlines"] = {"failed": "it ended", "patches": {"outlines-states": "declined"}, "threads": None}
    text = guided.table(report)
    assert "DIFFER (1,000)" in text and "TOKEN IDS DIFFER" in text and "All token ids" not in text
    assert "outlines refused recursive: no recursion" in text
    assert "outlines: not applied: outlines-states (declined)" in text and "outlines: the engine failed" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backends", "lmfe,xgrammar"], "--backends: lmfe; known are outlines, xgrammar, guidance"),
        (["--backends", ""], "--backends: none given"),
        (["--batches", "0"], "--batches must be 1 or more"),
        (["--batches", ""], "--batches must be 1 or more"),
        (["--tokens", "0"], "--tokens must be 1 or more"),
        (["--repeat", "0"], "--repeat must be 1 or more"),
        (["--schemas", ""], "--schemas: none given"),
        (["--schemas", "bunded"], "bunded: no file, and no built-in schema (those are flat, bounded,"),
        (["--engine-args", "dtype=half"], "--engine-args 'dtype=half': a JSON object is needed"),
        (["--engine-args", "[]"], "--engine-args '[]': a JSON object is needed"),
        (["--prompt", "the same for all"], "--prompt needs {}"),
    ],
)
def test_options_that_make_no_sense_are_one_line(capsys, words, told):
    assert guided.run(options(*words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("guided: ") and told in line


def test_schemas_are_built_in_or_files(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"type": "integer"}))
    assert schemas.find(str(file)) == ("mine", '{"type": "integer"}')
    assert set(schemas.SCHEMAS) == {"flat", "bounded", "nested", "enums", "union", "recursive"}
    for content, told in (("no", "not JSON"), ("[]", "is a list")):
        file.write_text(content)
        with pytest.raises(schemas.NoSchema, match=told):
            schemas.find(str(file))


def test_the_demo_asks_for_what_bench_guided_would():
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    chosen = {**demo.DECIDED, **vars(parser.parse_args([])), "batches": [64]}
    assert set(vars(options())) - {"plot"} <= set(chosen)


def test_the_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_speedups.bench import plots

    for draw, report in ((plots.guided, reports.guided()), (plots.prefix, reports.prefix())):
        file = tmp_path / "plot.png"
        draw(report, str(file))
        assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 5_000
        file.unlink()
