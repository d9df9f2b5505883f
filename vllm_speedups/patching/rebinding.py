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


def rebind(path: str, old: object, new: object, owner: object = None) -> object:
    """Replace `old` by `new` at its home and, for a module's own names, wherever it was imported by name.

    Looked at are the same name in every module, and all names in modules of the target's own package. (Every name of
    every module would be 85 ms in a vLLM process, for imports under another name that nobody makes.) Modules imported
    later find the new object at its home. Lazy modules are not triggered: only names already bound are looked at.
    Returns the owner, a module or a class. Given back as `owner`, a home where somebody else is by then is left alone.
    """
    if owner is None:
        owner, name = owner_of(path)
        setattr(owner, name, new)
    else:
        name = split(path)[1].rpartition(".")[2]
        if vars(owner).get(name) is old:
            setattr(owner, name, new)
    if not isinstance(owner, ModuleType):
        return owner
    package = path.partition(".")[0].partition(":")[0]
    for full_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        namespace = vars(module)
        if full_name.partition(".")[0] == package:
            names = [key for key, value in list(namespace.items()) if value is old]
        else:
            names = [name] if namespace.get(name) is old else []
        for bound in names:
            namespace[bound] = new
    return owner
