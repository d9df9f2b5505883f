"""Stages: each counts its own time only, whatever is inside of what, and everything is put back afterwards."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from vllm_speedups.bench import stages


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def engine(monkeypatch):
    """A module with two methods, one inside of the other, and a kernel that is launched through an index."""
    clock, module = Clock(), ModuleType("some_engine")
    monkeypatch.setattr(stages, "time", clock)

    class Runner:
        def execute_model(self) -> str:
            clock.now += 3.0
            return "done"

        def apply(self) -> None:
            clock.now += 0.25
            module.kernel[7](1)
            clock.now += 0.5

    class Kernel:
        name = "the kernel"

        def __getitem__(self, grid: int):
            def launch(argument: int) -> None:
                clock.now += grid

            return launch

    class Inherits(Runner):
        pass

    class Grammar:
        def accept_tokens(self, tokens: list) -> int:
            clock.now += 0.125
            return len(tokens)

    class Backend:
        def compile_grammar(self) -> Grammar:
            clock.now += 0.5
            return Grammar()

    module.Grammar, module.Backend = Grammar, Backend
    module.Runner, module.Inherits, module.kernel, module.clock = Runner, Inherits, Kernel(), clock
    monkeypatch.setitem(sys.modules, "some_engine", module)
    timed = (
        ("forward", "some_engine", "Runner.execute_model"),
        ("forward", "some_engine", "Inherits.execute_model"),
        ("transfer", "some_engine", "Runner.apply"),
        ("advance", "some_engine", "Backend.compile_grammar"),
        ("apply", "some_engine", "kernel"),
        ("sample", "some_engine", "Runner.missing"),
        ("sample", "another_engine", "missing"),
    )
    monkeypatch.setattr(stages, "_TIMED", timed)
    return module


def test_each_stage_counts_its_own_time_and_the_rest_is_other(engine):
    before, synchronized = (engine.Runner.execute_model, engine.Runner.apply, engine.kernel), []
    measured = stages.Stages(lambda: synchronized.append(engine.clock.now))
    with measured:
        for _ in range(2):
            assert engine.Inherits().execute_model() == "done"
            engine.Runner().apply()
            assert engine.kernel.name == "the kernel"
            engine.clock.now += 10.0
    expected = {"forward": 3000.0, "transfer": 750.0, "apply": 7000.0, "other": 10_000.0}
    assert measured.summary() == {"steps": 2, **dict.fromkeys(stages.STAGES, 0.0), **expected}
    assert (engine.Runner.execute_model, engine.Runner.apply, engine.kernel) == before
    # Before and after each of three stages, twice, and at the end.
    assert len(synchronized) == 2 * 3 * 2 + 1


def test_grammars_are_timed_one_by_one_and_their_class_is_left_as_it_is(engine):
    backend, before = engine.Backend(), dict(vars(engine.Grammar))
    measured = stages.Stages()
    with measured:
        grammar = backend.compile_grammar()
        assert [grammar.accept_tokens([1, 2]), engine.Grammar().accept_tokens([1])] == [2, 1]
        assert dict(vars(engine.Grammar)) == before
    summary = measured.summary()
    assert (summary["advance"], summary["other"]) == (125.0, 625.0)
    assert "making" not in engine.Backend.compile_grammar.__qualname__


def test_what_raises_is_counted_and_put_back(engine):
    def failing(self) -> None:
        engine.clock.now += 1.0
        raise ValueError("no")

    engine.Runner.apply = failing
    measured = stages.Stages()
    with pytest.raises(ValueError), measured:
        engine.Runner().apply()
    assert measured.summary()["transfer"] == 1000.0 and engine.Runner.apply is failing


def test_the_stages_are_those_of_the_installed_vllm():
    pytest.importorskip("vllm")
    import importlib

    found = set()
    for stage, module, name in stages._TIMED:
        if "gpu." in module or name == "GPUModelRunner.apply_grammar_bitmask":
            continue
        owner = importlib.import_module(module)
        for part in name.split("."):
            owner = vars(owner)[part]
        found.add(stage)
    assert found == set(stages.STAGES) - {"other"}
