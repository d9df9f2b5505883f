"""Targets: finding a definition in the source without importing it, and telling stock objects from replaced ones."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import FunctionType

from .contract import Declined
from .sources import Source, module_file, split


def source_file(module: str) -> Path | None:
    """The source file of a module, found without importing it or its parents, or None."""
    root, *rest = module.split(".")
    loaded = sys.modules.get(root)
    places = list(getattr(loaded, "__path__", ()))
    if not places:
        try:
            spec = importlib.util.find_spec(root)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        if not rest:
            return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        places = list(spec.submodule_search_locations or ())
    return module_file(places, rest)


class Here(Source):
    """What this process imports, or would import. A file that changes is read anew."""

    def stamp(self, module: str) -> object:
        file = source_file(module)
        if file is None:
            return None
        status = file.stat()
        return file, status.st_size, status.st_mtime_ns

    def read(self, module: str) -> bytes | None:
        file = source_file(module)
        return None if file is None else file.read_bytes()


_here = Here()


def _node(path: str) -> ast.AST | None:
    try:
        return _here.definition(path)
    except (OSError, SyntaxError, ValueError):
        return None


def forget_sources() -> None:
    """Drop the parsed sources: they are large and only needed while contracts are checked."""
    _here.forget()


def seen_fingerprint(path: str) -> str | None:
    """The fingerprint of `module:qualname` as installed, or None where there is no such definition to be read.

    UNPARSED where this Python cannot parse the module.
    """
    try:
        return _here.fingerprint(path)
    except OSError:
        return None


def installed_version(package: str) -> str | None:
    """The version of another package than vLLM, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def imported(module: str) -> bool:
    """Whether a module is imported, and not still being executed."""
    found = sys.modules.get(module)
    return found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False)


def resolve(path: str) -> object:
    """The live object. Raises Declined where the imported module lacks it, or a class on the way is another's."""
    module, qualname = split(path)
    value: object = sys.modules[module]
    names = qualname.split(".")
    for depth, name in enumerate(names):
        if depth:
            home = ".".join(names[:depth])
            if not issubclass(type(value), type) or (value.__module__, value.__qualname__) != (module, home):
                raise Declined(f"{path} is not there, {module}:{home} was replaced by {origin(value)}")
        value = value.__dict__.get(name, _MISSING) if isinstance(value, type) else getattr(value, name, _MISSING)
        if value is _MISSING:
            raise Declined(f"{path} is not there at run time")
    return value


def require_stock(path: str) -> object:
    """The live object, if it is the one that the source file defines. Raises Declined naming who replaced it.

    Functions are compared with the source by file and first line, classes by module and name: a wrapper made by
    another plugin has a code object of its own, or none.
    """
    value = resolve(path)
    module, qualname = split(path)
    owner = getattr(value, "__vllm_speedups__", None)
    if owner is not None:
        raise Declined(f"{path} is already replaced by our own patch {owner}")
    node = _node(path)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return value
    # Types are asked for with type(), never isinstance(): a wrapt proxy claims to be what it wraps.
    if issubclass(type(value), type):
        if (value.__module__, value.__qualname__) != (module, qualname):
            raise Declined(f"{path} was replaced by {origin(value)}")
        return value
    if node is None:
        raise Declined(f"the source of {path} cannot be read")
    decorators = getattr(node, "decorator_list", ())
    code = _own_code(value, not all(_makes_method(decorator) for decorator in decorators))
    first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    if (
        code is None
        or code.co_firstlineno != first_line
        or not _same_file(code.co_filename, source_file(module))
        or code.co_name != qualname.rpartition(".")[2]
    ):
        raise Declined(f"{path} was replaced by {origin(value, code)}")
    return value


def _own_code(value: object, decorated: bool):
    """The code object of a function. What a wrapper wraps counts only where the source has decorators of its own."""
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    if decorated:
        while hasattr(value, "__wrapped__"):
            value = value.__wrapped__
    elif "__wrapped__" in getattr(value, "__dict__", {}):
        return None
    return value.__code__ if type(value) is FunctionType else None


def _makes_method(decorator: ast.AST) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id in ("staticmethod", "classmethod")


def _same_file(one: str, other: Path | None) -> bool:
    if other is None:
        return False
    return os.path.realpath(one) == os.path.realpath(other)


def origin(value: object, code=None) -> str:
    """Where somebody's object comes from, in words: a class by name, a function by file and line."""
    if issubclass(type(value), type):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    if code is None and type(value) is FunctionType:
        code = value.__code__
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    # wrapt keeps the wrapping function there; a proxy's own __code__ is what it wraps.
    wrapper = getattr(getattr(value, "_self_wrapper", value), "__code__", None)
    where = f" ({wrapper.co_filename}:{wrapper.co_firstlineno})" if wrapper is not None else ""
    return f"a {type(value).__module__}.{type(value).__qualname__}{where}"


_MISSING = object()
