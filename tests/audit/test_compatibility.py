"""The matrix: its facts cover the contracts and agree with them and with the installed vLLM, and its page is fresh."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_speedups import compatibility, releases
from vllm_speedups.compatibility import ENGINE, cell, page
from vllm_speedups.doctor import find_vllm
from vllm_speedups.facts import FACTS, MISSING, Facts, Incomplete, refresh
from vllm_speedups.patching import UNPARSED, Contract, Form, seen_fingerprint
from vllm_speedups.plugin import discover
from vllm_speedups.proofs import PROOFS, Proofs

ROOT = Path(__file__).parents[2]
CONTRACTS, *OTHERS = compatibility.by_package(discover()).values()
OTHERS = tuple((compatibility.stored(contracts[0].package, ROOT), contracts) for contracts in OTHERS)


@pytest.fixture(scope="module")
def facts() -> Facts:
    return compatibility.stored("vllm", ROOT)


def proofs(facts) -> Proofs:
    """The proofs in the checkout, wherever the tests run."""
    return Proofs.load(facts.releases, ROOT / PROOFS)


def test_wherever_a_patch_of_todays_engine_applies_its_tests_were_run(facts):
    known = proofs(facts)
    for contract in CONTRACTS:
        if contract.engine == "V1" and not contract.proof:
            for version in facts.releases:
                one = cell(contract, version, facts, known)
                if one.verdict.status == "applied":
                    assert one.proof != "listed", f"{contract.name} on {version}: run `make prove-releases`"


def test_a_proof_is_of_a_release_to_which_the_patch_applies(facts):
    for contract in CONTRACTS:
        for version in proofs(facts).known.get(contract.name, ()):
            assert cell(contract, version, facts).verdict.status == "applied", (contract.name, version)


def test_the_facts_cover_every_path_of_every_contract(facts):
    for known, contracts in ((facts, CONTRACTS), *OTHERS):
        known.check(contracts)
    assert facts.releases == sorted(facts.releases, key=Version) and facts.releases[0] == compatibility.OLDEST


def test_the_page_is_made_of_the_facts_and_contracts_as_they_are(facts):
    fresh = page(facts, CONTRACTS, OTHERS, proofs(facts))
    assert (ROOT / compatibility.PAGE).read_text(encoding="utf-8") == fresh, "run `make compatibility`"


def test_releases_have_the_fingerprints_that_contracts_list_them_with(facts):
    for about, contracts in ((facts, CONTRACTS), *OTHERS):
        for name, form in ((contract.name, form) for contract in contracts for form in contract.forms):
            for path, known in form.paths().items():
                for digest, versions in known.items():
                    for version in versions:
                        assert about.fingerprint(path, version) == digest, (name, form.name, path, version)


def test_a_release_that_a_form_lists_gets_that_form(facts):
    for contract in CONTRACTS:
        for form in contract.forms:
            lists = [{v for versions in known.values() for v in versions} for known in form.paths().values()]
            for version in set.intersection(*lists):
                seen = {path: facts.fingerprint(path, version) for path in contract.paths()}
                assert contract.match(seen).name == form.name, (contract.name, version)


def test_the_facts_are_those_of_the_installed_vllm(facts):
    found = find_vllm()
    if found is None or found["version"] not in facts.releases:
        pytest.skip("no vLLM of which there are facts is installed")
    for contract in CONTRACTS:
        for path in contract.paths():
            assert facts.fingerprint(path, found["version"]) == seen_fingerprint(path), path


def test_the_engine_tests_run_the_release_that_the_page_names():
    assert re.search(r"^VLLM\s*:=\s*(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1] == ENGINE


def test_a_contract_that_the_facts_do_not_cover_says_which_target_to_run(facts):
    contract = contract_of({"vllm.new:target": {"aa": ("0.32.0",)}})
    for use in (facts.check, lambda contracts: page(facts, contracts)):
        with pytest.raises(Incomplete, match=r"vllm\.new:target.*`make facts compatibility`"):
            use([*CONTRACTS, contract])


def test_releases_of_another_package_have_a_section_of_their_own():
    other = Facts(["0.1", "0.2"], package="other", seen={"other.m:f": {"0.1": "a", "0.2": "x"}})
    versions, form = SpecifierSet("<1"), Form("only", {"other.m:f": {"a": ("0.1",)}}, {})
    contract = Contract("beside", "V0", versions, (form,), proof="run", package="other")
    text = page(known(v0_32_0=("a", "c")), [contract_of(TARGETS, PREMISES)], ((other, [contract]),))
    assert "## Releases of other" in text and "| 0.2 | declined |\n| 0.1 | applied, own code |\n" in text
    assert "beside" not in text.partition("## Releases of other")[0].partition("| patch |")[2]


def contract_of(targets, premises=None, vllm=">=0.30", proof="", name="speedy") -> Contract:
    return Contract(name, "V1", SpecifierSet(vllm), (Form("only", targets, premises or {}),), proof=proof)


def known(**versions) -> Facts:
    """Facts about `m:f` and `m:g`: version -> the two fingerprints."""
    facts = Facts([version.replace("_", ".")[1:] for version in versions])
    for path, place in (("m:f", 0), ("m:g", 1)):
        facts.seen[path] = {version.replace("_", ".")[1:]: pair[place] for version, pair in versions.items()}
    return facts


def test_facts_survive_being_written_and_read():
    facts = known(v0_4_0=("a", MISSING), v0_4_1=("b", MISSING), v0_5_0=("a", UNPARSED), v0_6_0=("a", "c"))
    facts.without_wheel["0.5.1"] = "no wheel"
    text = facts.dump()
    assert Facts.load(text) == facts
    assert '"a": "0.4.0 0.5.0..0.6.0"' in text and '"missing": "0.4.0..0.4.1"' in text


TARGETS = {"m:f": {"a": (ENGINE, "0.30.0"), "b": ("0.31.0",)}}
PREMISES = {"m:g": {"c": (ENGINE, "0.30.0"), "d": ("0.33.0",)}}


@pytest.mark.parametrize(
    ("version", "pair", "proof", "said"),
    [
        (ENGINE, ("a", "c"), "", "applied, engine"),
        (ENGINE, ("a", "c"), "run", "applied, engine"),
        ("0.30.0", ("a", "c"), "run", "applied, own code"),
        ("0.30.0", ("a", "c"), "", "applied, same code as 0.32.0"),
        ("0.34.0", ("a", "c"), "run", "applied, same code as 0.32.0"),
        ("0.34.0", ("b", "d"), "run", "applied, same parts"),
        ("0.34.0", ("x", "c"), "run", "declined"),
        ("0.34.0", ("a", UNPARSED), "run", "declined"),
        ("0.34.0", ("a", MISSING), "run", "declined"),
        ("0.34.0", (MISSING, "c"), "run", "not there"),
        ("0.29.0", ("a", "c"), "run", "not meant"),
        ("0.29.0", (MISSING, "c"), "run", "not there"),
    ],
)
def test_a_cell_says_what_happens_and_how_that_is_known(version, pair, proof, said):
    facts = known(**{f"v{version.replace('.', '_')}": pair})
    assert cell(contract_of(TARGETS, PREMISES, proof=proof), version, facts).text() == said


def test_a_release_that_is_listed_without_a_proof_is_said_to_be_only_listed():
    facts = known(v0_31_0=("b", "e"))
    assert cell(contract_of(TARGETS, {"m:g": {"e": ("0.31.0",)}}), "0.31.0", facts).text() == "applied, listed"


def test_the_page_names_reasons_and_releases_without_a_wheel():
    facts = known(
        v0_4_0=(MISSING, "c"), v0_29_0=("a", "c"), v0_32_0=("a", "c"), v0_33_0=("x", MISSING), v0_34_0=("x", MISSING)
    )
    facts.without_wheel["0.28.0"] = "no wheel here"
    text = page(facts, [contract_of(TARGETS, PREMISES)])
    assert "| `speedy` | 1: 0.32.0 | 2: 0.33.0 to 0.34.0 | 1: 0.29.0 | 1: 0.4.0 |" in text
    assert "- `speedy` on 0.33.0 to 0.34.0\n  - target `m:f` changed\n  - premise `m:g` missing\n" in text
    assert "Left out: 0.28.0 (no wheel here)." in text and "`speedy` would fit 0.29.0 too" in text
    assert "| 0.32.0 | applied, engine |" in text


def test_refreshing_reads_what_is_not_known_and_can_be_interrupted(sources, tmp_path, monkeypatch):
    utils = "vllm.v1.structured_output.utils"
    path = f"{utils}:apply_grammar_bitmask"
    for version in ("0.30.0", "0.31.0", "0.32.0"):
        (sources if version != "0.30.0" else sources.without(utils)).wheel(tmp_path, version)
    wheels = releases.wheels_in(tmp_path, "vllm")
    assert list(wheels) == ["0.30.0", "0.31.0", "0.32.0"]
    read, saved = [], []
    opened = releases.opened

    @contextlib.contextmanager
    def watched(target, distribution="vllm"):
        read.append(target)
        if target == "0.29.0":
            raise releases.NoWheel("0.29.0: none")
        if stop and target == str(wheels["0.30.0"]):
            raise KeyboardInterrupt
        with opened(target, distribution) as release:
            yield release

    monkeypatch.setattr(releases, "opened", watched)
    facts, stop = Facts(), True
    contracts = [contract_of({path: {"aa": ("0.32.0",)}})]

    def again(contracts) -> Facts:
        """A run that starts from what the last one saved."""
        read.clear()
        facts = Facts.load(saved[-1]) if saved else Facts()
        listed = ["0.29.0", *wheels]
        refresh(facts, contracts, listed, wheels, lambda: saved.append(facts.dump()), lambda line: None)
        return facts

    with pytest.raises(KeyboardInterrupt):
        again(contracts)
    assert read == [str(wheels[version]) for version in ("0.32.0", "0.31.0", "0.30.0")]
    stop = False
    facts = again(contracts)
    assert read == [str(wheels["0.30.0"]), "0.29.0"]
    assert facts.releases == list(wheels) and list(facts.without_wheel) == ["0.29.0"]
    assert facts.seen[path]["0.30.0"] == MISSING
    assert facts.seen[path]["0.31.0"] == facts.seen[path]["0.32.0"] == seen_fingerprint(path)
    again(contracts)
    assert read == ["0.29.0"]
    more = contract_of({path: {"aa": ("0.32.0",)}}, {"vllm.v1.utils:ConstantList": {"bb": ("0.32.0",)}})
    facts = again([more])
    assert len(read) == 4 and set(facts.seen) == more.paths()


def test_the_command_writes_the_page_or_says_what_is_missing(tmp_path, monkeypatch, capsys):
    for file in (FACTS, compatibility.PAGE):
        (tmp_path / file).parent.mkdir()
    for file in (ROOT / FACTS).parent.glob("releases*.json"):
        (tmp_path / FACTS.with_name(file.name)).write_bytes(file.read_bytes())
    facts = (ROOT / FACTS).read_text(encoding="utf-8")
    (tmp_path / PROOFS).write_text((ROOT / PROOFS).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert compatibility.main(["page"]) == 0
    assert (tmp_path / compatibility.PAGE).read_bytes() == (ROOT / compatibility.PAGE).read_bytes()
    (tmp_path / FACTS).write_text(facts.replace("GrammarOutput", "Other"), encoding="utf-8")
    assert compatibility.main(["page"]) == 1
    assert "make facts" in capsys.readouterr().err
