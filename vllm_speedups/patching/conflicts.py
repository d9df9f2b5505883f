"""Conflicts: who replaced, wrapped or subclassed what a patch replaced, found by looking and never by listening."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType

from .contract import Declined
from .rebinding import owner_of
from .targets import origin, resolve, split

# How many wrappers deep a replacement is looked for.
_DEPTH = 8


def bound(path: str) -> object:
    """What is bound at `module:qualname` now, or None where there is nothing."""
    try:
        return resolve(path)
    except (Declined, KeyError):
        return None


def displaced(path: str, gate: object) -> str:
    """What somebody bound at a target after us, in words that name it, or an empty text where ours is still there.

    So too where the target's module is gone, and with it whoever could use it.
    """
    if split(path)[0] not in sys.modules:
        return ""
    try:
        there = resolve(path)
    except Declined as no:
        return f"{no}, after us"
    if there is gate:
        return ""
    how = "wrapped" if leads_to(there, gate) else "replaced"
    return f"{path} was {how} after us by {origin(there)}"


def premise_displaced(path: str, stock: object) -> str:
    """The same for a premise, which a patch relies on as it was when the patch was put in place.

    A plain value is vLLM's own to set anew.
    """
    if not isinstance(stock, (FunctionType, type, staticmethod, classmethod)):
        return ""
    try:
        there = resolve(path)
    except Declined as no:
        return f"{no}, after us"
    if there is stock or hasattr(there, "__vllm_speedups__"):
        return ""
    return f"{path} was replaced after us by {origin(there)}"


def overriding(paths: Iterable) -> list:
    """Lines about classes of other packages that override a target method, and so keep their own."""
    found: dict = {}
    for path in paths:
        if split(path)[0] not in sys.modules:
            continue
        owner, name = owner_of(path)
        if isinstance(owner, type):
            home = split(path)[0].partition(".")[0]
            for subclass in _subclasses(owner):
                if name in vars(subclass) and subclass.__module__.partition(".")[0] != home:
                    found.setdefault(f"{subclass.__module__}.{subclass.__qualname__}", []).append(name)
    return [f"{subclass} keeps its own {', '.join(names)}" for subclass, names in found.items()]


def intact(kind: type, gates: Mapping) -> bool:
    """Whether each method of a class that is a target is ours there, neither overridden nor replaced since."""
    for path, gate in gates.items():
        owner, name = owner_of(path)
        if isinstance(owner, type) and issubclass(kind, owner) and inspect.getattr_static(kind, name, None) is not gate:
            return False
    return True


def _subclasses(kind: type) -> list:
    found = list(type.__subclasses__(kind))
    return found + [deeper for one in found for deeper in _subclasses(one)]


def leads_to(value: object, gate: object, depth: int = _DEPTH) -> bool:
    """Whether a wrapper holds `gate`: as what it wraps, as a partial's function, or in its closure."""
    if value is gate:
        return True
    if not depth:
        return False
    if type(value) in (staticmethod, classmethod):
        return leads_to(value.__func__, gate, depth - 1)
    inner = [getattr(value, "__wrapped__", None)]
    if isinstance(value, functools.partial):
        inner.append(value.func)
    for cell in getattr(value, "__closure__", None) or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:
            continue
    return any(leads_to(one, gate, depth - 1) for one in inner if callable(one))
