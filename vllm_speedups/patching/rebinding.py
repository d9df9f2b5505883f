"""Rebinding: putting a new object wherever a name is bound to the old one, and taking it back."""

from __future__ import annotations

import sys
from types import ModuleType

from .targets import split


def owner_of(path: str) -> tuple:
    """The object that holds `module:qualname`, a module or a class, and the attribute's name."""
    module, qualname = split(path)
    owner: object = sys.modules[module]
    *scopes, name = qualname.split(".")
    for scope in scopes:
        owner = getattr(owner, scope)
    return owner, name


def rebind(path: str, old: object, new: object) -> int:
    """Replace `old` by `new` at its home and, for a module's own names, in every module that imported it by name.

    Returns the number of places. Modules imported later find the new object at its home. Lazy modules are not
    triggered: only names that are already bound are looked at.
    """
    owner, name = owner_of(path)
    setattr(owner, name, new)
    places = 1
    if not isinstance(owner, ModuleType):
        return places
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        namespace = vars(module)
        for bound in [key for key, value in list(namespace.items()) if value is old]:
            namespace[bound] = new
            places += 1
    return places
