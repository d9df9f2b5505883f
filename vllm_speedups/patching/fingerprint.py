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


def _may_bind(line: str, name: str) -> bool:
    """Whether a stripped line that contains `name` may bind it: errs on the side of yes."""
    before, _, after = line.partition(name)
    if before in ("def ", "class ", "async def "):
        return not (after[:1].isalnum() or after[:1] == "_")
    return "import" in before or before == "" or before.endswith(("(", ", ", "as "))


def parse_around(source: str, name: str) -> ast.Module:
    """A module in which `find` finds what `name` is bound to in `source`, parsing as little of it as is safe.

    Where a single line binds the name, by a definition in the first column, that definition is enough. It ends where the
    next line begins in the first column; were that inside of a string or brackets, the cut would not parse. Line numbers
    are those of `source`. (Parsing all of vLLM's modules that patches look at takes 100 ms, this way 25.)
    """
    lines = source.split("\n")
    bindings = [number for number, line in enumerate(lines) if name in line and _may_bind(line.strip(), name)]
    first = bindings[0] if bindings else 0
    if len(bindings) != 1 or not lines[first].startswith(("async", "def", "class")):
        return ast.parse(source)
    last = first + 1
    while last < len(lines) and (not lines[last] or lines[last][0] in " \t#)]}\r\f"):
        last += 1
    while first and lines[first - 1].startswith(("@", "#")):
        first -= 1
    if first and lines[first - 1][:1] in (")", "]", "}"):
        return ast.parse(source)
    try:
        return ast.parse("\n" * first + "\n".join(lines[first:last]))
    except SyntaxError:
        return ast.parse(source)


def _last_binding(scope: ast.AST, name: str) -> ast.AST | None:
    found: ast.AST | None = None
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
            if isinstance(node, ast.JoinedStr):
                # Some 3.12 put empty texts into the format of an f-string.
                value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
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
        # Not repr(): which characters it escapes differs between Python versions.
        update(f"{type(node).__name__}:{node!a}".encode())
