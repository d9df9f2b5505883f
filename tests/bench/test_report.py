"""Reports: what stands in them, and what cannot be written is said before anything is measured."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from importlib.util import find_spec

import pytest

from vllm_speedups.bench import report


def test_a_report_holds_the_command_the_options_and_the_machine(monkeypatch):
    words = ["bench", "guided", "--json", "a.json", "--tokens", "8", "--plot=a.png", "--prompt", "two words"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/vllm-speedups", *words])
    made = report.make("guided", Namespace(json="a.json", tokens=8, batches=[1], run=print), rows=[1])
    assert made["command"] == "vllm-speedups bench guided --tokens 8 --prompt 'two words'"
    assert (made["what"], made["options"], made["rows"]) == ("guided", {"tokens": 8, "batches": [1]}, [1])
    assert made["machine"]["cpu"] and made["machine"]["cores"] >= 1 and "torch" in made["machine"]["versions"]


def test_the_table_is_printed_and_the_report_written(tmp_path, capsys):
    file, drawn = tmp_path / "r.json", []
    options = Namespace(json=str(file), plot=str(tmp_path / "r.png"))
    report.finish(options, {"figure": 1}, lambda made: f"figure {made['figure']}", lambda *given: drawn.append(given))
    assert capsys.readouterr().out == "figure 1\n" and json.loads(file.read_text()) == {"figure": 1}
    assert drawn == [({"figure": 1}, options.plot)]


def test_a_dash_prints_the_report_in_place_of_the_table(capsys):
    report.finish(Namespace(json="-"), {"figure": 1}, lambda made: "table")
    assert json.loads(capsys.readouterr().out) == {"figure": 1}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"json": "nowhere/a.json"}, "--json nowhere/a.json: there is no folder nowhere"),
        ({"plot": "nowhere/a.png"}, "--plot nowhere/a.png: there is no folder nowhere"),
        ({"plot": "a.txt"}, "--plot a.txt: the name must end in .png"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch, options, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "find_spec", lambda name: object())
    assert report.obstacle(Namespace(**{"json": None, "plot": None, **options})).startswith(told)


def test_a_plot_without_matplotlib_is_one_line(monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert "pip install 'vllm-speedups[plot]'" in report.obstacle(Namespace(json=None, plot="a.png"))
    assert report.obstacle(Namespace(json="-", plot=None)) == "" == report.obstacle(Namespace(json="a.json"))
