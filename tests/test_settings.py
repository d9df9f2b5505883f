"""Settings: what is read from the environment, and the one line for each value that makes no sense."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_speedups import settings

BUDGETS = {
    settings.MASK_CACHE_MB: "mask_cache_mb",
    settings.ROW_CACHE_MB: "row_cache_mb",
    settings.PREFIX_MEMO_MB: "prefix_memo_mb",
    settings.GUIDE_CACHE_MB: "guide_cache_mb",
}
DEFAULTS = {
    "disable": (),
    "enable": (),
    "strict": False,
    "mask_cache_mb": 256,
    "row_cache_mb": 256,
    "prefix_memo_mb": 64,
    "guide_cache_mb": 512,
}


def read(**environ) -> tuple:
    warnings: list = []
    return settings.read(environ, warnings.append), warnings


@pytest.mark.parametrize("environ", [{}, dict.fromkeys(settings.VARIABLES, ""), dict.fromkeys(BUDGETS, "  ")])
def test_defaults_without_a_warning(environ):
    found, warnings = read(**environ)
    assert dataclasses.asdict(found) == DEFAULTS and warnings == []


@pytest.mark.parametrize("variable", BUDGETS)
@pytest.mark.parametrize(
    "text", ["lots", "-1", "-0.5", "inf", "-inf", "nan", "1e999", "1e308", "256MB", "0x10", "1,5", "None"]
)
def test_a_budget_that_makes_no_sense_is_warned_about_once_and_the_default_used(variable, text):
    found, warnings = read(**{variable: text})
    assert dataclasses.asdict(found) == DEFAULTS
    assert len(warnings) == 1
    assert variable in warnings[0] and repr(text) in warnings[0]
    assert f"default, {DEFAULTS[BUDGETS[variable]]}," in warnings[0] and "\n" not in warnings[0]


@pytest.mark.parametrize("variable", BUDGETS)
@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("0.0", 0), ("1", 1), (" 512 ", 512), ("0.25", 0.25), ("1e3", 1000)]
)
def test_a_budget_that_makes_sense_is_used(variable, text, value):
    found, warnings = read(**{variable: text})
    assert dataclasses.asdict(found) == {**DEFAULTS, BUDGETS[variable]: value} and warnings == []


@pytest.mark.parametrize(
    ("text", "strict", "warned"),
    [
        *[(text, True, 0) for text in ("1", "true", " YES ", "on")],
        *[(text, False, 0) for text in ("0", "False", "off", "no", " ")],
        *[(text, False, 1) for text in ("2", "maybe", "-1")],
    ],
)
def test_switches(text, strict, warned):
    found, warnings = read(**{settings.STRICT: text})
    assert found.strict is strict and len(warnings) == warned
    assert all(settings.STRICT in warning and repr(text) in warning for warning in warnings)


@pytest.mark.parametrize(
    ("text", "names"),
    [("a", ("a",)), ("a,b", ("a", "b")), (" a , b ,", ("a", "b")), (",,", ()), ("all", ("all",)), ("a-b", ("a-b",))],
)
def test_disabled_patches_are_a_list_of_names(text, names):
    found, warnings = read(**{settings.DISABLE: text})
    assert found.disable == names and warnings == []
    assert all(found.disables(SimpleNamespace(name=name, off_by_default="")) for name in names)
    assert bool(found.disables(SimpleNamespace(name="other", off_by_default=""))) is ("all" in names)


def test_a_patch_that_is_off_by_default_waits_to_be_asked_for():
    patch = SimpleNamespace(name="new", off_by_default="not measured yet")
    assert settings.ENABLE in read()[0].disables(patch) and "not measured yet" in read()[0].disables(patch)
    assert read(**{settings.ENABLE: "other, new"})[0].disables(patch) == ""
    assert "by the user" in read(**{settings.ENABLE: "new", settings.DISABLE: "new"})[0].disables(patch)


def test_every_nonsense_value_is_warned_about_on_its_own():
    found, warnings = read(**dict.fromkeys([*BUDGETS, settings.STRICT], "x"))
    assert dataclasses.asdict(found) == DEFAULTS and len(warnings) == len(BUDGETS) + 1
    assert [sum(name in warning for warning in warnings) for name in (*BUDGETS, settings.STRICT)] == [1] * 4


@given(st.dictionaries(st.sampled_from(settings.VARIABLES), st.text()))
def test_no_environment_whatever_raises(environ):
    found, warnings = read(**environ)
    assert len(warnings) <= len(environ)
    for field in BUDGETS.values():
        assert int(getattr(found, field) * 2**20) >= 0


def test_the_environment_of_the_process_is_read_once(environ, said):
    environ.setenv(settings.MASK_CACHE_MB, "lots")
    environ.setenv(settings.ROW_CACHE_MB, "7")
    first = settings.current()
    environ.setenv(settings.ROW_CACHE_MB, "8")
    assert settings.current() is first and first.row_cache_mb == 7
    assert [settings.MASK_CACHE_MB in text for text in said.texts(logging.WARNING)] == [True]
