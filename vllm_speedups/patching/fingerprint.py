"""Fingerprints of code: a SHA-256 over what a definition does, not over how it is written down."""

from __future__ import annotations

import ast
import hashlib

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Fields that say nothing about behaviour, or that only some Python versions fill in.
_SILENT = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "simple", "type_ignores"})
# Compound statements whose bodies are searched for a definition: `if TYPE_CHECKING: ... else: def f` is common.
_BLOCKS = ("body", "orelse", "handlers", "finalbody")


def fingerprint(node: ast.AST) -> str:
    """The SHA-256, in hexadecimal, of a node's canonical form.

    Docstrings, comments, annotations and formatting are left out, so two definitions with equal fingerprints run the
    same. The result does not depend on the Python version that computes it (3.9 to 3.13): fields are visited by name,
    in sorted order, and empty ones are skipped, since versions differ in which empty fields exist.
    """
    digest = hashlib.sha256()
    _feed(node, digest.update)
    return digest.hexdigest()


def find(tree: ast.Module, qualname: str) -> ast.AST | None:
    """The definition or assignment that `qualname` names in a parsed module, or None. The last one wins, as at run time."""
    scope: ast.AST = tree
    for name in qualname.split("."):
        found = _last_binding(scope, name)
        if found is None:
            return None
        scope = found
    return scope


def find_in_source(source: str | bytes, qualname: str) -> ast.AST | None:
    """Like `find`, from source text. Raises SyntaxError where this Python cannot read it."""
    return find(ast.parse(source), qualname)


def _last_binding(scope: ast.AST, name: str) -> ast.AST | None:
    found = None
    for block in _BLOCKS:
        for statement in getattr(scope, block, ()):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if statement.name == name:
                    found = statement
            elif isinstance(statement, ast.Assign):
                if any(isinstance(target, ast.Name) and target.id == name for target in statement.targets):
                    found = statement
            elif isinstance(statement, ast.AnnAssign):
                if isinstance(statement.target, ast.Name) and statement.target.id == name:
                    found = statement
            elif any(hasattr(statement, inner) for inner in _BLOCKS):
                found = _last_binding(statement, name) or found
    return found


def _feed(node: object, update) -> None:
    if isinstance(node, ast.AST):
        update(b"(" + type(node).__name__.encode())
        for field in sorted(node._fields):
            if field in _SILENT:
                continue
            value = getattr(node, field, None)
            if field == "body" and isinstance(node, _DOCUMENTED) and isinstance(value, list):
                value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
            if value is None and not (isinstance(node, ast.Constant) and field == "value"):
                continue
            if isinstance(value, list) and not value:
                continue
            update(b" " + field.encode() + b"=")
            _feed(value, update)
        update(b")")
    elif isinstance(node, list):
        update(b"[")
        for item in node:
            # An absent default in `kw_defaults` or an absent key in a dict display is None and must keep its place.
            _feed(item, update)
            update(b",")
        update(b"]")
    else:
        update(f"{type(node).__name__}:{node!r}".encode("utf-8", "surrogatepass"))
