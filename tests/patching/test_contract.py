"""Contracts: what cannot be read is named, what matches is chosen, what does not is told."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from vllm_speedups.patching import Contract, ContractError, Declined, Form, load
from vllm_speedups.plugin import discover

GOOD = """
name = "speedy-thing"
engine = "V1"
vllm = ">=0.32,<2"
summary = "s"
what = "w"
why = "y"
how = "h"
delete_when = "d"
upstream = ["https://example.org/1"]

[[forms]]
name = "new"
[forms.targets."pkg.mod:Class.f"]
aa = ["1.0", "1.1"]
bb = ["1.2"]
[forms.premises."pkg.other:LIMIT"]
cc = ["1.0"]

[[forms]]
name = "old"
[forms.targets."pkg.mod:f"]
dd = ["0.9"]
"""


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "speedy_thing"
    place.mkdir()
    return place


def write(folder, text: str):
    (folder / "patch.toml").write_text(text, encoding="utf-8")
    return folder


def test_a_good_contract_is_read_in_full(folder):
    contract = load(write(folder, GOOD))
    assert (contract.name, contract.engine, contract.folder) == ("speedy-thing", "V1", folder)
    assert contract.versions == SpecifierSet(">=0.32,<2") and contract.upstream == ("https://example.org/1",)
    assert contract.prose == {"summary": "s", "what": "w", "why": "y", "how": "h", "delete_when": "d"}
    assert (contract.off_by_default, contract.proof) == ("", "")
    assert load(write(folder, 'proof = "run"\n' + GOOD)).proof == "run"
    new, old = contract.forms
    assert (new.name, old.name) == ("new", "old")
    assert new.targets == {"pkg.mod:Class.f": {"aa": ("1.0", "1.1"), "bb": ("1.2",)}}
    assert new.premises == {"pkg.other:LIMIT": {"cc": ("1.0",)}} and old.premises == {}
    assert set(new.paths()) == {"pkg.mod:Class.f", "pkg.other:LIMIT"}


FORMS = GOOD.index("[[forms]]")
BROKEN = {
    "not toml": ("name = ", "name == ", ""),
    "no name": ('name = "speedy-thing"\n', "", "name"),
    "another name": ("speedy-thing", "speedy", "name"),
    "no version": ('vllm = ">=0.32,<2"\n', "", "vllm"),
    "nonsense version": (">=0.32,<2", "newest", "vllm"),
    "version not a text": ('">=0.32,<2"', "0.32", "vllm"),
    "no engine": ('engine = "V1"\n', "", "engine"),
    "empty prose": ('why = "y"', 'why = "  "', "why"),
    "missing prose": ('delete_when = "d"\n', "", "delete_when"),
    "no forms": (GOOD[FORMS:], "", "forms"),
    "forms not tables": (GOOD[FORMS:], "", "forms"),
    "form without a name": ('name = "new"\n', "", "name"),
    "form without targets": (GOOD[GOOD.index('[forms.targets."pkg.mod:f"]') :], "", "targets"),
    "target without a colon": ("pkg.mod:Class.f", "pkg.mod.Class.f", "pkg.mod.Class.f"),
    "premise without a colon": ("pkg.other:LIMIT", "pkg.other", "pkg.other"),
    "targets not a table": ('[forms.targets."pkg.mod:f"]\ndd = ["0.9"]', 'targets = "pkg.mod:f"', "targets"),
    "fingerprints not a table": (
        '[forms.targets."pkg.mod:f"]\ndd = ["0.9"]',
        '[forms.targets]\n"pkg.mod:f" = "dd"',
        "pkg.mod:f",
    ),
    "versions not a list": ('dd = ["0.9"]', 'dd = "0.9"', "pkg.mod:f"),
    "upstream not a list": ('["https://example.org/1"]', '"https://example.org/1"', "upstream"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_contract_that_cannot_be_read_names_its_file_and_the_field(folder, how):
    old, new, field = BROKEN[how]
    assert GOOD.count(old) >= 1
    text = GOOD.replace(old, new, 1)
    if how == "forms not tables":
        text = 'forms = ["new"]\n' + text
    with pytest.raises(ContractError) as caught:
        load(write(folder, text))
    assert str(folder / "patch.toml") in str(caught.value) and field in str(caught.value)


def test_a_contract_that_is_missing_or_not_text_names_its_file(folder):
    with pytest.raises(ContractError, match=r"patch\.toml"):
        load(folder)
    (folder / "patch.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ContractError, match=r"patch\.toml"):
        load(folder)


def contract_of(*forms: Form, vllm: str = ">=0.32") -> Contract:
    return Contract(name="x", engine="V1", versions=SpecifierSet(vllm), forms=forms)


NEW = Form("new", {"m:f": {"1": ("a",), "2": ("b",)}, "m:g": {"3": ("a",)}}, {"m:h": {"4": ("a",)}})
OLD = Form("old", {"m:f": {"1": ("a",)}}, {})


def test_the_first_form_that_fits_is_chosen():
    contract = contract_of(NEW, OLD)
    assert contract.match({"m:f": "1", "m:g": "3", "m:h": "4"}) is NEW
    assert contract.match({"m:f": "2", "m:g": "3", "m:h": "4"}) is NEW
    assert contract.match({"m:f": "1", "m:g": "9", "m:h": "4"}) is OLD
    assert contract_of(OLD, NEW).match({"m:f": "1", "m:g": "3", "m:h": "4"}) is OLD


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"m:f": "9", "m:g": "3", "m:h": "4"}, "m:f changed"),
        ({"m:f": "1", "m:g": "3", "m:h": "9"}, "m:h changed"),
        ({"m:f": None, "m:g": "3", "m:h": "4"}, "m:f is missing"),
        ({"m:g": "9"}, "m:f is missing; m:g changed; m:h is missing"),
    ],
)
def test_what_does_not_fit_is_named(seen, reason):
    with pytest.raises(Declined) as caught:
        contract_of(NEW).match(seen)
    assert str(caught.value) == reason
    assert "; ".join(map(str, caught.value.differences)) == reason


def test_the_form_that_comes_closest_is_reported():
    far = Form("far", {"m:a": {"1": ()}, "m:b": {"1": ()}}, {})
    near = Form("near", {"m:a": {"1": ()}, "m:c": {"1": ()}}, {})
    for forms in ((far, near), (near, far)):
        with pytest.raises(Declined) as caught:
            contract_of(*forms).match({"m:a": "1", "m:b": None, "m:c": "2"})
        assert str(caught.value) in ("m:c changed", "m:b is missing")
    with pytest.raises(Declined) as caught:
        contract_of(far, near).match({"m:a": "2", "m:b": "2", "m:c": "1"})
    assert str(caught.value) == "m:a changed"
    with pytest.raises(Declined, match="no forms"):
        contract_of().match({})


@pytest.mark.parametrize(
    ("versions", "version", "meant"),
    [
        (">=0.32", "0.32.0", True),
        (">=0.32", "0.31.9", False),
        (">=0.32", "0.32.0rc1", True),
        (">=0.32", "0.32.1.dev7+g0123abc.cpu", True),
        (">=0.32", "0.32.0+cpu", True),
        (">=0.32", "1.0.0a1", True),
        (">=0.4,<0.10", "0.10.0", False),
        (">=0.4,<0.10", "0.9.2.post1", True),
        (">=0.4,<0.10", "dev", False),
        (">=0.4,<0.10", None, False),
        (">=0.4", None, True),
    ],
)
def test_which_versions_a_patch_is_meant_for(versions, version, meant):
    assert contract_of(OLD, vllm=versions).meant_for(version) is meant


def test_a_contract_may_be_for_another_package(folder):
    contract = load(write(folder, GOOD))
    assert contract.package == "vllm" and contract.meant.startswith("vLLM ")
    other = load(write(folder, 'package = "outlines"\n' + GOOD.replace("vllm =", "outlines =")))
    assert other.package == "outlines" and other.versions == contract.versions
    assert other.meant == contract.meant.replace("vLLM", "outlines")
    with pytest.raises(ContractError, match="'outlines' must be a text"):
        load(write(folder, 'package = "outlines"\n' + GOOD))


def test_every_patch_that_ships_has_a_readable_contract():
    patches = discover()
    assert {"grammar-masks", "outlines-states", "block-hashes"} <= {patch.name for patch in patches}
    for patch in patches:
        for form in patch.contract.forms:
            for path, known in form.paths().items():
                assert all(len(digest) == 64 and versions for digest, versions in known.items()), (patch.name, path)
