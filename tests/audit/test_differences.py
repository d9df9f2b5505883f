"""The diff of two releases: which definitions it shows, how, its exit status, and that it leaves nothing behind."""

from __future__ import annotations

import pytest

UTILS = "vllm.v1.structured_output.utils"
MASKS = "vllm.v1.structured_output.utils:apply_grammar_bitmask"
OUTLINES = "vllm.v1.structured_output.backend_outlines"


@pytest.fixture
def old(sources, tmp_path):
    return sources.tree(tmp_path / "old", "0.32.0")


def test_equal_code_gives_nothing_and_zero(vs, sources, tmp_path, old):
    new = sources.changed(
        UTILS, "def apply_grammar_bitmask(", "# A comment.\ndef apply_grammar_bitmask(\n    # Another.\n"
    )
    status, out, err = vs("diff", old, new.wheel(tmp_path, "0.33.0"))
    assert (status, err) == (0, "")
    assert out.startswith("0 of ") and out.endswith("definitions differ between 0.32.0 and 0.33.0\n")


def test_a_changed_definition_is_shown_as_a_unified_diff(vs, sources, tmp_path, old):
    new = sources.changed(UTILS, "def apply_grammar_bitmask(", "@new\ndef apply_grammar_bitmask(")
    before = sorted(tmp_path.rglob("*"))
    status, out, _ = vs("diff", old, new.tree(tmp_path / "new", "0.33.0"))
    assert status == 1
    title, removed, added, place, *body = out.splitlines()
    assert title == f"{MASKS} (grammar-masks)"
    assert (removed, added) == (f"--- 0.32.0 {UTILS}", f"+++ 0.33.0 {UTILS}")
    assert place.startswith("@@ -1,3 +1,4 @@")
    assert body[:2] == ["+@new", " def apply_grammar_bitmask("]
    assert body[-1].startswith("1 of ")
    assert [file for file in sorted(tmp_path.rglob("*")) if "new" not in file.parts] == before


def test_a_definition_that_one_lacks_is_said_to_be_missing(vs, sources, tmp_path, old):
    new = sources.without(UTILS).tree(tmp_path / "new", "0.33.0")
    for one, other in ((old, new), (new, old)):
        status, out, _ = vs("diff", one, other)
        assert status == 1
        assert out.startswith(f"{MASKS} (grammar-masks)\n  missing in 0.33.0, there in 0.32.0\n\n1 of ")


def test_code_that_this_python_cannot_parse_is_said_to_be_that(vs, sources, tmp_path, old):
    new = sources.changed(UTILS, "def apply_grammar_bitmask(", "def apply_grammar_bitmask(newer syntax, ")
    status, out, _ = vs("diff", old, new.tree(tmp_path / "new", "0.33.0"))
    assert status == 1 and f"{MASKS} (grammar-masks)\n  cannot be parsed by this Python in 0.33.0\n" in out


def test_patches_can_be_chosen(vs, sources, tmp_path, old):
    new = sources.changed(UTILS, "def apply_grammar_bitmask(", "def apply_grammar_bitmask(_, ")
    new = new.changed(OUTLINES, "def fill_bitmask(self", "def fill_bitmask(_, self").tree(tmp_path / "new", "0.33.0")
    status, out, _ = vs("diff", "--patch", "outlines-states", old, new)
    assert status == 1 and "OutlinesGrammar.fill_bitmask (outlines-states)" in out and MASKS not in out
    status, out, _ = vs("diff", "--patch", "outlines-states", "--patch", "grammar-masks", old, new)
    assert status == 1 and "OutlinesGrammar.fill_bitmask" in out and MASKS in out
    status, _, _ = vs("diff", "--patch", "block-hashes", old, new)
    assert status == 0
    status, out, err = vs("diff", "--patch", "gramar-masks", old, new)
    assert (status, out) == (2, "") and "gramar-masks" in err and "grammar-masks" in err.partition("known")[2]


def test_what_cannot_be_read_is_named(vs, tmp_path, old):
    for targets in ((old, tmp_path / "nothing"), (tmp_path / "nothing", old)):
        status, out, err = vs("diff", *targets)
        assert (status, out) == (2, "")
        assert err.startswith(f"{tmp_path / 'nothing'}: ") and err.count("\n") == 1
