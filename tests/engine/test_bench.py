"""`bench guided` on real engines: every id compared, every stage seen, what a backend does not do reported."""

from __future__ import annotations

import json

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
