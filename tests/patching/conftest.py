"""A workshop of throw-away packages and patches for them."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from vllm_speedups.patching import Contract, Form, Patch, apply, find_in_source, fingerprint

_numbers = itertools.count()

LIB = '''
def double(x):
    """Twice x."""
    return x * 2


class Counter:
    def __init__(self):
        self.n = 0

    def add(self, by):
        self.n += by
        return self.n

    @staticmethod
    def zero():
        return 0

    @classmethod
    def made(cls):
        return cls()


LIMIT = 3
'''


class Workshop:
    """One throw-away package, on sys.path while a test runs."""

    def __init__(self, folder):
        # Names are never used twice in a process: post-import hooks outlive a test.
        self.root = f"throwaway{next(_numbers)}"
        self.folder = folder / self.root
        self.folder.mkdir()
        self.glues = itertools.count()
        self.write("__init__", "")

    def write(self, name: str, source: str) -> str:
        """Write a module of the package. Returns its full name."""
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return f"{self.root}.{name}"

    def load(self, name: str):
        return importlib.import_module(f"{self.root}.{name}")

    def path(self, short: str) -> str:
        return f"{self.root}.{short}"

    def form(self, *targets: str, premises=(), name: str = "only") -> Form:
        """A form that was proven against the sources as they are now."""

        def known(paths):
            result = {}
            for path in paths:
                module, _, qualname = path.partition(":")
                node = find_in_source((self.folder / f"{module}.py").read_text(), qualname)
                result[self.path(path)] = {fingerprint(node): ("1",)}
            return result

        return Form(name, known(targets), known(premises))

    def patch(self, *targets: str, build=None, probe=None, premises=(), name: str = "speedy") -> Patch:
        """A patch of `module:qualname`s of this package; without `build` it adds 100 to whatever stock returns."""

        def hundred_more(context):
            def more(stock):
                return lambda *args, **kwargs: stock(*args, **kwargs) + 100

            return {path: more(context.stock[path]) for path in map(self.path, targets)}

        glue = f"{self.root}_glue{next(self.glues)}"
        sys.modules[glue] = SimpleNamespace(build=build or hundred_more, probe=probe or (lambda *_: None))
        form = self.form(*targets, premises=premises)
        return Patch(Contract(name=name, engine="V1", versions=SpecifierSet(">=1"), forms=(form,)), glue=glue)

    def apply(self, *patches: Patch, version="1.0", disables=lambda contract: "", eager: bool = False) -> Patch:
        apply(patches, version, disables, eager)
        return patches[0]


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    shop = Workshop(tmp_path)
    shop.write("lib", LIB)
    yield shop
    for module in [name for name in sys.modules if name.startswith(shop.root)]:
        del sys.modules[module]
