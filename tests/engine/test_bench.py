"""`bench guided` on real engines: every id compared, every stage seen, what a backend does not do reported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm_speedups import cli

pytestmark = pytest.mark.engine


def test_a_small_run_from_end_to_end(tmp_path, capsys):
    file = tmp_path / "guided.json"
    (tmp_path / "thirds.json").write_text('{"type": "integer", "multipleOf": 3}')
    words = "bench guided --backends xgrammar --batches 4,2 --tokens 8 --repeat 2 --minutes 0"
    schemas = f"enums,{tmp_path / 'thirds.json'}"
    assert cli.main([*words.split(), "--schemas", schemas, "--json", str(file)]) == 0
    report, shown = json.loads(file.read_text()), capsys.readouterr().out
    rows = {(row["schema"], row["batch"], row["name"]): row for row in report["rows"]}
    assert all(row["equal"] and row["tokens"] > 0 for row in rows.values())
    assert [len(rows["enums", 4, name]["ratios"]) for name in ("cold", "warm", "new outputs")] == [1, 2, 2]
    assert (None, 2, "unguided") in rows and ("enums", 2, "cold") not in rows
    assert [one["schema"] for one in report["refused"]] == ["thirds"] and "xgrammar refused thirds" in shown
    assert [(one["schema"], one["batch"]) for one in report["stages"]] == [("enums", 4), ("enums", 2)]
    for one in report["stages"]:
        for side in ("stock", "patched"):
            stages = dict(one[side])
            assert stages.pop("steps") >= 8
            assert all(value > 0 for value in stages.values()), stages
    assert report["engines"]["xgrammar"]["patches"]["grammar-masks"] == "applied"
    assert "no cache" in shown and "All token ids are equal." in shown


def test_requests_with_grammars_never_seen(tmp_path):
    file = tmp_path / "first.json"
    words = "bench first --schemas 4 --batch 2 --tokens 8"
    assert cli.main([*words.split(), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert row["equal"] and 8 < row["tokens"] <= 64 and row["stock"]["median"] > 0
    assert report["engines"]["xgrammar"]["patches"]["xgrammar-states"] == "applied"


@pytest.mark.parametrize("outputs", [1, 3])
def test_rows_of_outputs_that_go_on_together(tmp_path, outputs):
    (tmp_path / "folder").mkdir()
    schema = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 300}}, "required": ["word"]}
    tests = [{"data": {"word": word}, "valid": True} for word in ("short", "a word that takes more tokens than the other")]
    (tmp_path / "folder" / "words.json").write_text(json.dumps({"schema": schema, "tests": tests}))
    (tmp_path / "folder" / "made-up.json").write_text(json.dumps({"schema": schema}))
    words = ["bench", "rows", "--backends", "xgrammar", "--schemas", str(tmp_path / "folder"), "--json", str(tmp_path / "json")]
    command = [sys.executable, "-m", "vllm_speedups.cli", *words, "--outputs", str(outputs), "--tokens", "5"]
    assert subprocess.run(command, timeout=300).returncode == 0
    made_up, given = json.loads((tmp_path / "json").read_text())["rows"]
    assert given["wrong"] == made_up["wrong"] == 0
    assert 0 < made_up["rows"] <= 5 * outputs and given["rows"] > 5 * (outputs - 1)
    assert given["warm"]["avg"] > 0 and (made_up["cold"] is None) == (outputs == 1)
