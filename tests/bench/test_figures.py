"""Figures of the documents: each comes from a report in docs/figures, and the documents show what the reports hold."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import reports

from vllm_speedups.bench import figures
from vllm_speedups.bench.bars import draw

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).parents[2]
MARKED = "Before.\n<!-- figures {} -->\nold\n<!-- /figures -->\nAfter.\n"


def test_the_documents_show_what_the_reports_hold():
    for file in figures.documents(ROOT):
        text = file.read_text()
        assert figures.render(text, ROOT / figures.FIGURES) == text, f"{file.name}: run `make figures`"


def test_the_bars_show_what_their_report_holds():
    for report in figures.bars(ROOT):
        drawn = report.with_suffix(".svg").read_text()
        assert draw(json.loads(report.read_text())) == drawn, f"{report.stem}.svg: run `make figures`"


def test_bars_are_as_long_as_the_rates_and_say_them():
    svg = ElementTree.fromstring(draw(reports.guided("demo")))
    texts = ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]
    assert texts[-3:] == ["xgrammar", "550", "1200, 2.18 times"]
    _, stock, patched = (float(rect.get("width")) for rect in svg.iter(f"{SVG}rect"))
    assert patched / stock == pytest.approx(1200 / 550, rel=1e-3)


def test_every_report_is_shown_somewhere_and_says_where_it_comes_from():
    shown = "".join(file.read_text() for file in figures.documents(ROOT))
    for file in (ROOT / figures.FIGURES).glob("*.json"):
        report = json.loads(file.read_text())
        assert f"<!-- figures {file.stem} -->" in shown, f"{file.name} is shown nowhere"
        assert report["command"].startswith("vllm-speedups ") and {"cpu", "cores", "versions"} <= set(report["machine"])


def test_a_marked_place_is_filled_with_the_command_and_its_table_and_nothing_else_is_touched(tmp_path):
    (tmp_path / "some-figures.json").write_text(json.dumps(reports.guided()))
    text = figures.render(MARKED.format("some-figures"), tmp_path)
    lines = text.splitlines()
    assert lines[:4] == ["Before.", "<!-- figures some-figures -->", "", "    vllm-speedups bench guided"]
    assert lines[-3:] == ["", "<!-- /figures -->", "After."] and "\nold" not in text
    assert "    vLLM 0.32.0 on A Processor, 4 cores; 32 tokens" in text
    assert all(line == line.rstrip() and (not line or line.startswith("    ")) for line in lines[2:-2])
    assert figures.render(text, tmp_path) == text


@pytest.mark.parametrize("content", [None, "no JSON"])
def test_a_report_that_is_missing_or_broken_is_one_line_that_names_it(tmp_path, monkeypatch, capsys, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "README.md").write_text(MARKED.format("lost"))
    if content:
        (tmp_path / "docs" / "figures" / "lost.json").write_text(content)
    assert figures.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "lost.json" in line and "make measure" in line
    assert (tmp_path / "README.md").read_text() == MARKED.format("lost")


def test_a_missing_report_does_not_keep_others_from_being_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "docs" / "figures" / "there.json").write_text(json.dumps(reports.guided()))
    (tmp_path / "README.md").write_text(MARKED.format("lost") + MARKED.format("there"))
    assert figures.main([]) == 2
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(MARKED.format("lost")) and "A Processor" in text
