"""Each patch on the installed vLLM as a whole: its contract fits, its glue builds, its probe agrees, and it goes again."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_speedups import plugin
from vllm_speedups.patching import APPLIED, DECLINED, NOT_MEANT, REVERTED, apply, engine


@pytest.mark.parametrize("name", sorted(patch.name for patch in plugin.discover()))
def test_a_patch_that_is_meant_for_this_vllm_applies_and_its_probe_agrees_with_stock(name):
    import vllm

    patch = next(patch for patch in plugin.discover() if patch.name == name)
    apply([patch], vllm.__version__, lambda contract: "", eager=True)
    try:
        if patch.status == NOT_MEANT:
            pytest.skip(patch.reason)
        assert patch.status == APPLIED, patch.reason
        assert patch.live
    finally:
        if patch.active:
            patch.revert()
    assert patch.status == REVERTED


def declined(name: str) -> str:
    """Why a patch is off once it was applied to the installed vLLM and proven at once. Everything is stock's then."""
    import vllm

    from vllm_speedups.patching.targets import require_stock

    patch = next(patch for patch in plugin.discover() if patch.name == name)
    apply([patch], vllm.__version__, lambda contract: "", eager=True)
    assert patch.status == DECLINED and not patch.live
    for path in patch.form.targets if patch.form else ():
        assert require_stock(path)
    return patch.reason


@pytest.mark.parametrize("name", sorted(patch.name for patch in plugin.discover() if patch.contract.libraries))
def test_a_library_of_a_version_that_nobody_tried_keeps_its_patch_off_in_one_line(name, monkeypatch):
    monkeypatch.setattr(engine, "installed_version", lambda library: "99.0")
    (library,) = next(patch.contract.libraries for patch in plugin.discover() if patch.name == name)
    reason = declined(name)
    assert f"{library} is 99.0, and this patch was proven with" in reason and "\n" not in reason


def test_a_serialised_form_of_xgrammars_that_nobody_knows_is_declined_by_the_probe(monkeypatch):
    xgrammar = pytest.importorskip("xgrammar")
    stock = xgrammar.Grammar.serialize_json
    known = re.compile(r'"__VERSION__":"v\d+"')
    monkeypatch.setattr(xgrammar.Grammar, "serialize_json", lambda self: known.sub('"__VERSION__":"v99"', stock(self)))
    assert "its serialised form has an unknown version" in declined("xgrammar-states")


def test_a_vocabulary_of_xgrammars_that_is_not_what_it_was_given_is_declined_by_the_probe(monkeypatch):
    pytest.importorskip("xgrammar")
    from vllm_speedups.patches import xgrammar_states

    stock = xgrammar_states.vocabulary_of

    def shifted(info):
        whole = stock(info)
        return type(whole)([b"", *(whole[token] for token in range(len(whole) - 1))], info.serialize_json)

    monkeypatch.setattr(xgrammar_states, "vocabulary_of", shifted)
    assert "the vocabulary that xgrammar shows" in declined("xgrammar-states")


def test_an_outlines_core_that_numbers_states_anew_each_time_is_declined_by_the_probe(monkeypatch):
    outlines_core = pytest.importorskip("outlines_core")
    stock, made = outlines_core.Index, []

    def numbered(*arguments):
        made.append(stock(*arguments))
        number = len(made)
        return SimpleNamespace(get_transitions=lambda: {number: {}})

    monkeypatch.setattr(outlines_core, "Index", numbered)
    assert "numbers the states of one expression differently" in declined("outlines-states")


def test_an_llguidance_that_cannot_do_what_the_probe_asks_is_declined(monkeypatch):
    llguidance = pytest.importorskip("llguidance")
    monkeypatch.delattr(llguidance, "LLMatcher")
    assert "its probe failed" in declined("guidance-history")
