"""The patch engine on small modules: what it puts in place, proves, leaves alone, and takes back."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import sys
import threading
import time
import types

import pytest
import wrapt

from vllm_speedups.patching import APPLIED, DECLINED, DISABLED, NOT_MEANT, REVERTED, WAITING, Declined
from vllm_speedups.patching import engine as engine_module


def boom(*args, **kwargs):
    raise ZeroDivisionError("boom")


def test_a_patch_replaces_its_target_and_knows_the_original(workshop):
    lib = workshop.load("lib")
    patch = workshop.apply(workshop.patch("lib:double"))
    assert (patch.status, patch.live, patch.active, patch.form.name) == (APPLIED, True, True, "only")
    assert lib.double(2) == 104 and lib.double(x=3) == 106
    assert patch.stock[workshop.path("lib:double")](2) == 4
    assert (lib.double.__name__, lib.double.__doc__) == ("double", "Twice x.")


def test_names_that_other_modules_imported_are_rebound_and_restored(workshop):
    workshop.write("early", "from .lib import double\nfrom .lib import double as twice")
    workshop.write("late", "from .lib import double")
    lib, early = workshop.load("lib"), workshop.load("early")
    stock = lib.double
    patch = workshop.apply(workshop.patch("lib:double"))
    late = workshop.load("late")
    assert [f(1) for f in (lib.double, early.double, early.twice, late.double)] == [102] * 4
    patch.revert()
    assert patch.status == REVERTED and not patch.active
    assert {lib.double, early.double, early.twice, late.double} == {stock}


def test_lazy_modules_are_not_triggered(workshop):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"triggered by {name}")

    workshop.load("lib")
    sys.modules[f"{workshop.root}.lazy"] = Lazy("lazy")
    sys.modules[f"{workshop.root}.no_module"] = object()
    patch = workshop.apply(workshop.patch("lib:double"))
    patch.revert()
    assert patch.status == REVERTED, patch.reason


def test_a_lazily_loaded_name_is_the_new_one(workshop):
    workshop.write("lazy", "def __getattr__(name):\n    from . import lib\n    return getattr(lib, name)")
    workshop.load("lib")
    lazy = workshop.load("lazy")
    patch = workshop.apply(workshop.patch("lib:double"))
    assert lazy.double(1) == 102
    patch.revert()
    assert lazy.double(1) == 2


def test_methods_are_replaced_on_their_class_and_restored(workshop):
    lib = workshop.load("lib")
    stock = dict(vars(lib.Counter))
    counter, paths = lib.Counter(), ["lib:Counter.add", "lib:Counter.zero", "lib:Counter.made"]

    def build(context):
        add, zero, made = (context.stock[workshop.path(path)] for path in paths)
        return {
            workshop.path("lib:Counter.add"): lambda self, by: add(self, by) + 100,
            workshop.path("lib:Counter.zero"): staticmethod(lambda: zero.__func__() + 100),
            workshop.path("lib:Counter.made"): classmethod(lambda cls: (made.__func__(cls), 100)),
        }

    patch = workshop.apply(workshop.patch(*paths, build=build))
    assert patch.status == APPLIED, patch.reason
    assert (counter.add(1), counter.n) == (101, 1)
    assert lib.Counter.zero() == 100 and lib.Counter().zero() == 100 and lib.Counter.made()[1] == 100
    patch.revert()
    assert dict(vars(lib.Counter)) == stock


def test_whoever_kept_the_replacement_gets_stock_after_a_revert(workshop):
    lib = workshop.load("lib")
    patch = workshop.apply(workshop.patch("lib:double", "lib:Counter.add"))
    double, add = lib.double, lib.Counter().add
    assert double(1) == 102 and add(1) == 101
    patch.revert()
    assert double(1) == 2 and add(1) == 2


def test_what_another_plugin_puts_over_ours_survives_a_revert(workshop, said):
    lib = workshop.load("lib")
    patch = workshop.apply(workshop.patch("lib:double"))
    ours = lib.double
    lib.double = lambda x: ours(x) + 1000
    assert lib.double(1) == 1102
    patch.revert()
    assert lib.double(1) == 1002
    assert any("lib:double was wrapped after us" in text for text in said.texts(logging.WARNING))


def differs(context, replacements):
    raise Declined("its probe found another answer than stock's")


@pytest.mark.parametrize(("probe", "reason"), [(differs, "found another answer"), (boom, "boom")])
def test_a_probe_that_fails_at_first_use_leaves_stock_and_says_why(workshop, said, probe, reason):
    workshop.write("early", "from .lib import double")
    lib, early = workshop.load("lib"), workshop.load("early")
    stock = lib.double
    patch = workshop.apply(workshop.patch("lib:double", probe=probe))
    assert patch.status == APPLIED
    assert early.double(1) == 2
    assert lib.double is stock and early.double is stock
    assert patch.status == DECLINED and reason in patch.reason
    assert [reason in text for text in said.texts(logging.WARNING)] == [True]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (boom, "boom"),
        (lambda context: {}, "its contract says"),
        (lambda context: differs(context, None), "another answer"),
    ],
)
def test_a_build_that_fails_changes_nothing(workshop, build, reason):
    lib = workshop.load("lib")
    stock = lib.double
    patch = workshop.apply(workshop.patch("lib:double", build=build))
    assert patch.status == DECLINED and not patch.active and reason in patch.reason
    assert lib.double is stock


def test_glue_that_cannot_be_imported_changes_nothing(workshop):
    lib = workshop.load("lib")
    patch = workshop.patch("lib:double")
    patch.glue = f"{workshop.root}.nowhere"
    workshop.apply(patch)
    assert patch.status == DECLINED and "nowhere" in patch.reason and lib.double(1) == 2


def test_a_replacement_that_keeps_failing_is_reverted_and_logged(workshop, said):
    lib = workshop.load("lib")

    def build(context):
        stock = context.stock[workshop.path("lib:double")]

        def double(x):
            calls.append(x)
            try:
                boom()
            except ZeroDivisionError as error:
                context.failed(error)
            return stock(x)

        return {workshop.path("lib:double"): double}

    calls, stock = [], lib.double
    patch = workshop.apply(workshop.patch("lib:double", build=build))
    kept = lib.double
    for attempt in range(1, engine_module.MAX_FAILURES + 1):
        assert patch.live
        assert kept(attempt) == 2 * attempt
    assert (patch.live, patch.status) == (False, REVERTED) and lib.double is stock
    assert kept(5) == 10 and calls == list(range(1, engine_module.MAX_FAILURES + 1))
    errors = said.texts(logging.ERROR)
    assert len(errors) == 2 and "failed once" in errors[0] and "was reverted" in errors[1] and "boom" in errors[1]


def wrapped(stock):
    @functools.wraps(stock)
    def somebody(*args, **kwargs):
        return stock(*args, **kwargs)

    return somebody


class Elsewhere:
    pass


REPLACEMENTS = {
    "functools.wraps": (wrapped, "test_engine.py"),
    "a lambda": (lambda stock: lambda x: stock(x), "test_engine.py"),
    "a class": (lambda stock: Elsewhere, "Elsewhere"),
    "an object": (lambda stock: Elsewhere(), "Elsewhere"),
    "functools.partial": (functools.partial, "functools.partial"),
    "a builtin": (lambda stock: len, "builtin"),
    "wrapt": (
        lambda stock: wrapt.FunctionWrapper(stock, lambda f, _, args, kwargs: f(*args, **kwargs)),
        "test_engine.py",
    ),
}


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_a_target_that_somebody_replaced_is_left_alone_and_named(workshop, how):
    lib = workshop.load("lib")
    replace, who = REPLACEMENTS[how]
    lib.double = theirs = replace(lib.double)
    patch = workshop.apply(workshop.patch("lib:double"))
    assert patch.status == DECLINED
    assert "lib:double was replaced by" in patch.reason and who in patch.reason
    assert lib.double is theirs


@pytest.mark.parametrize("how", ["functools.wraps", "a lambda", "wrapt"])
@pytest.mark.parametrize("method", ["add", "zero", "made"])
def test_a_method_that_somebody_replaced_is_left_alone_and_named(workshop, how, method):
    Counter = workshop.load("lib").Counter
    stock = vars(Counter)[method]
    replace, who = REPLACEMENTS[how]
    theirs = replace(stock) if method == "add" else type(stock)(replace(stock.__func__))
    setattr(Counter, method, theirs)
    patch = workshop.apply(workshop.patch(f"lib:Counter.{method}"))
    assert patch.status == DECLINED and f"Counter.{method} was replaced by" in patch.reason
    assert who in patch.reason or method != "add"
    assert vars(Counter)[method] is theirs


def test_a_premise_that_somebody_replaced_declines_the_patch(workshop):
    lib = workshop.load("lib")
    lib.Counter.add = lambda self, by: 7
    patch = workshop.apply(workshop.patch("lib:double", premises=["lib:Counter.add"]))
    assert patch.status == DECLINED and "Counter.add was replaced by" in patch.reason and lib.double(1) == 2


def test_a_target_with_decorators_of_its_own_is_stock(workshop):
    workshop.write(
        "decorated",
        """
        import functools

        @functools.lru_cache(None)
        def one(x):
            return x

        def note(f):
            @functools.wraps(f)
            def inner(x):
                return f(x)
            return inner

        @note
        @note
        def two(x):
            return x
        """,
    )
    decorated = workshop.load("decorated")
    patch = workshop.apply(workshop.patch("decorated:one", "decorated:two"))
    assert patch.status == APPLIED, patch.reason
    assert decorated.one(1) == 101 and decorated.two(1) == 101


def test_tampered_source_is_left_alone_and_the_target_named(workshop):
    patch = workshop.patch("lib:double", "lib:Counter.add")
    file = workshop.folder / "lib.py"
    file.write_text(file.read_text().replace("x * 2", "x * 3"))
    lib = workshop.load("lib")
    workshop.apply(patch)
    assert patch.status == DECLINED
    assert patch.reason == f"{workshop.path('lib:double')} changed"
    assert lib.double(1) == 3


def test_source_changed_on_disk_after_the_import_is_not_taken_for_the_live_code(workshop):
    lib = workshop.load("lib")
    file = workshop.folder / "lib.py"
    file.write_text("import os\n\n\n" + file.read_text())
    patch = workshop.apply(workshop.patch("lib:double"))
    assert patch.status == DECLINED and lib.double(1) == 2


def test_a_missing_module_and_a_missing_name_are_left_alone_and_named(workshop):
    for target, source in (("gone:f", "def f(): return 1"), ("lib2:g", "def g(): return 1")):
        module = target.partition(":")[0]
        workshop.write(module, source)
        patch = workshop.patch(target)
        if module == "gone":
            (workshop.folder / "gone.py").unlink()
        else:
            workshop.write(module, "def h(): return 1")
        workshop.apply(patch)
        assert patch.status == DECLINED and patch.reason == f"{workshop.path(target)} is missing"


def test_checking_a_contract_imports_nothing(workshop):
    workshop.write("costly", "raise AssertionError('imported')\ndef f(): return 1")
    patch = workshop.apply(workshop.patch("costly:f"))
    assert patch.status == WAITING and patch.active and not patch.live
    assert workshop.root not in sys.modules


def test_a_module_that_loads_later_is_patched_as_it_loads(workshop):
    workshop.write("user", "from .lib import double\nresult = double(1)")
    patch = workshop.apply(workshop.patch("lib:double"))
    assert patch.status == WAITING
    assert workshop.load("user").result == 102
    assert patch.status == APPLIED


def test_a_patch_of_two_modules_waits_for_both(workshop):
    workshop.write("other", "def triple(x):\n    return 3 * x")
    patch = workshop.apply(workshop.patch("lib:double", "other:triple"))
    lib = workshop.load("lib")
    assert patch.status == WAITING and lib.double(1) == 2
    other = workshop.load("other")
    assert patch.status == APPLIED and lib.double(1) == 102 and other.triple(1) == 103


def test_a_patch_of_two_modules_waits_while_one_of_them_imports_the_other(workshop):
    workshop.write("outer", "from .lib import double\n\ndef triple(x):\n    return 3 * x")
    patch = workshop.apply(workshop.patch("lib:double", "outer:triple"))
    outer = workshop.load("outer")
    assert patch.status == APPLIED, patch.reason
    assert outer.double(1) == 102 and outer.triple(1) == 103


def test_a_premise_in_a_module_that_is_still_being_imported_is_no_obstacle(workshop):
    workshop.write("outer", "from .lib import double\n\ndef triple(x):\n    return 3 * x")
    patch = workshop.apply(workshop.patch("lib:double", premises=["outer:triple"]))
    outer = workshop.load("outer")
    assert patch.status == APPLIED, patch.reason
    assert outer.double(1) == 102


def test_a_target_module_that_is_being_imported_when_the_patch_is_applied_is_waited_for(workshop):
    patch = workshop.patch("lib:double")
    sys.modules[f"{workshop.root}_starter"] = types.SimpleNamespace(start=lambda: workshop.apply(patch))
    file = workshop.folder / "lib.py"
    file.write_text(f"__import__('{workshop.root}_starter').start()\n" + file.read_text())
    patch.contract.forms[0].targets[workshop.path("lib:double")].update(
        workshop.form("lib:double").targets[workshop.path("lib:double")]
    )
    lib = workshop.load("lib")
    # Whether it is applied or declined, the import goes through and the answers are right.
    assert patch.status in (APPLIED, DECLINED)
    assert lib.double(1) == (102 if patch.status == APPLIED else 2)


def test_an_install_that_fails_in_the_import_hook_does_not_break_the_import(workshop, said):
    patch = workshop.apply(workshop.patch("lib:double", build=boom))
    assert workshop.load("lib").double(1) == 2
    assert patch.status == DECLINED and "boom" in patch.reason
    assert any("boom" in text for text in said.texts(logging.WARNING))


def test_a_revert_calls_off_a_patch_that_waits(workshop):
    patch = workshop.apply(workshop.patch("lib:double"))
    patch.revert()
    assert workshop.load("lib").double(1) == 2 and patch.status == REVERTED


def test_the_second_of_two_patches_on_one_target_is_declined_and_names_the_first(workshop):
    lib = workshop.load("lib")
    first, second = workshop.patch("lib:double", name="first"), workshop.patch("lib:double", name="second")
    workshop.apply(first, second)
    assert (first.status, second.status) == (APPLIED, DECLINED)
    assert "lib:double" in second.reason and "our own patch first" in second.reason
    assert lib.double(1) == 102


def test_the_probe_runs_once_and_before_anybody_gets_the_replacement(workshop):
    lib = workshop.load("lib")
    probing, probes, proven, results = threading.Event(), [], [], []

    def probe(context, replacements):
        probes.append(threading.get_ident())
        probing.set()
        time.sleep(0.1)
        proven.append(True)

    def build(context):
        def double(x):
            results.append(bool(proven))
            return x * 2 + 100

        return {workshop.path("lib:double"): double}

    workshop.apply(workshop.patch("lib:double", build=build, probe=probe))

    def late():
        probing.wait(5)
        answers.append(lib.double(1))

    answers: list = []
    threads = [threading.Thread(target=late) for _ in range(3)]
    threads.append(threading.Thread(target=lambda: answers.append(lib.double(1))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(probes) == 1 and len(answers) == 4
    assert all(results), "a replacement was used before its probe was done"
    assert answers == [102] * 4


def test_a_probe_that_fails_while_others_call_gives_all_of_them_stock(workshop):
    lib = workshop.load("lib")
    answers, probing = [], threading.Event()

    def probe(context, replacements):
        probing.set()
        time.sleep(0.1)
        raise Declined("different")

    workshop.apply(workshop.patch("lib:double", probe=probe))
    threads = [threading.Thread(target=lambda: answers.append(lib.double(1)))]
    threads += [threading.Thread(target=lambda: (probing.wait(5), answers.append(lib.double(1)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == [2] * 4


def test_a_probe_may_call_what_is_being_proven(workshop):
    lib = workshop.load("lib")
    seen = []
    workshop.apply(workshop.patch("lib:double", probe=lambda *_: seen.append(lib.double(1))))
    assert lib.double(1) == 102 and len(seen) == 1


@pytest.mark.parametrize("holds", [True, False])
def test_glue_that_proves_later_asks_for_its_probe_itself(workshop, said, holds):
    lib, probes, contexts = workshop.load("lib"), [], []

    def build(context):
        contexts.append(context)
        stock = context.stock[workshop.path("lib:double")]
        return {workshop.path("lib:double"): lambda x: stock(x) + 100 * len(probes)}

    def probe(context, replacements):
        probes.append(1)
        if not holds:
            differs(context, replacements)

    patch = workshop.patch("lib:double", build=build, probe=probe)
    sys.modules[patch.glue].PROVES_LATER = True
    workshop.apply(patch)
    assert lib.double(1) == 2 and not probes
    assert contexts[0].prove() is holds and contexts[0].prove() is holds and len(probes) == 1
    assert lib.double(1) == (102 if holds else 2)
    assert patch.status == ("applied" if holds else "declined")


def test_applying_twice_is_harmless(workshop):
    lib = workshop.load("lib")
    patch = workshop.apply(workshop.patch("lib:double"))
    gate = lib.double
    workshop.apply(patch)
    assert lib.double is gate and patch.status == APPLIED and lib.double(1) == 102
    waiting = workshop.patch("later:f") if workshop.write("later", "def f():\n    return 1") else None
    workshop.apply(waiting)
    workshop.apply(waiting)
    assert workshop.load("later").f() == 101
    declined = workshop.apply(workshop.patch("lib:double", name="second"))
    reason = declined.reason
    workshop.apply(declined)
    assert (declined.status, declined.reason) == (DECLINED, reason)


def test_eager_application_imports_and_proves_at_once(workshop):
    probes = []
    good = workshop.patch("lib:double", probe=lambda *_: probes.append(1))
    workshop.write("other", "def triple(x):\n    return 3 * x")
    bad = workshop.patch("other:triple", probe=differs)
    workshop.apply(good, bad, eager=True)
    assert (good.status, bad.status, probes) == (APPLIED, DECLINED, [1])
    assert "another answer" in bad.reason
    assert workshop.load("lib").double(1) == 102 and workshop.load("other").triple(1) == 3
    assert probes == [1]


def test_eager_application_of_a_module_that_cannot_be_imported_declines(workshop):
    workshop.write("broken", "raise ImportError('no such driver')\ndef f(): return 1")
    patch = workshop.apply(workshop.patch("broken:f"), eager=True)
    assert patch.status == DECLINED and "no such driver" in patch.reason


def test_a_patch_that_is_disabled_or_not_meant_is_not_even_checked(workshop):
    lib = workshop.load("lib")
    stock = lib.double
    disabled = workshop.apply(
        workshop.patch("lib:double"), disables=lambda contract: "off" if contract.name == "speedy" else ""
    )
    not_meant = workshop.apply(workshop.patch("lib:double"), version="0.9")
    assert (disabled.status, not_meant.status) == (DISABLED, NOT_MEANT)
    assert disabled.reason == "off" and ">=1" in not_meant.reason
    assert disabled.form is None and not disabled.active and not not_meant.active and lib.double is stock


def test_a_class_as_target_is_proven_at_once(workshop):
    workshop.write("user", "from .lib import Counter")
    lib, user = workshop.load("lib"), workshop.load("user")
    stock, probes = lib.Counter, []

    def build(context):
        return {
            workshop.path("lib:Counter"): type(
                "Counter", (context.stock[workshop.path("lib:Counter")],), {"fast": True}
            )
        }

    patch = workshop.apply(workshop.patch("lib:Counter", build=build, probe=lambda *_: probes.append(1)))
    assert probes == [1] and user.Counter.fast and lib.Counter is user.Counter
    patch.revert()
    assert lib.Counter is user.Counter is stock


@pytest.mark.parametrize(
    ("replace", "who"),
    [(lambda stock: Elsewhere, "Elsewhere"), (wrapt.ObjectProxy, "ObjectProxy"), (wrapped, "test_engine.py")],
)
def test_a_class_that_somebody_replaced_is_left_alone_and_named(workshop, replace, who):
    lib = workshop.load("lib")
    lib.Counter = theirs = replace(lib.Counter)
    patch = workshop.apply(workshop.patch("lib:Counter"))
    assert patch.status == DECLINED and who in patch.reason and lib.Counter is theirs


def test_a_static_method_behind_a_proxy_is_left_alone(workshop):
    Counter = workshop.load("lib").Counter
    Counter.zero = wrapt.ObjectProxy(vars(Counter)["zero"])
    patch = workshop.apply(workshop.patch("lib:Counter.zero"))
    assert patch.status == DECLINED and "ObjectProxy" in patch.reason


def test_reloaded_modules_keep_running_stock_or_ours_but_never_break(workshop):
    lib = workshop.load("lib")
    patch = workshop.apply(workshop.patch("lib:double"))
    importlib.reload(lib)
    assert lib.double(1) == 2
    patch.revert()
    assert lib.double(1) == 2 and patch.status == REVERTED


@pytest.mark.parametrize(
    ("installed", "status", "reason"),
    [("1.5", APPLIED, ""), ("0.9", NOT_MEANT, "meant for other >=1"), (None, NOT_MEANT, "other >=1, which is not installed")],
)
def test_a_patch_of_another_package_asks_for_its_version(workshop, monkeypatch, installed, status, reason):
    monkeypatch.setattr(engine_module, "installed_version", {"other": installed}.get)
    patch = workshop.patch("lib:double")
    patch.contract = dataclasses.replace(patch.contract, package="other")
    workshop.apply(patch, version="0.1", eager=True)
    assert patch.status == status and patch.reason.endswith(reason)
    patch.revert()


def test_packages_that_are_not_installed_have_no_version():
    assert engine_module.installed_version("no-such-package-anywhere") is None
    assert engine_module.installed_version("packaging")


def test_a_gate_has_the_signature_of_what_it_replaces(workshop):
    lib = workshop.load("lib")
    expected = inspect.signature(lib.double)
    workshop.apply(workshop.patch("lib:double"))
    assert inspect.signature(lib.double) == expected
