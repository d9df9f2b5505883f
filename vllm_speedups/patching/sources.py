"""Sources: places that definitions are read from. Nothing that is read is imported or executed."""

from __future__ import annotations

import ast
import zipfile
import zlib
from importlib.util import decode_source
from pathlib import Path

from .contract import UNPARSED
from .fingerprint import find, fingerprint, parse_around

# What parsing somebody else's source may raise: the last two where it is nested too deeply.
_NOT_PARSED = (SyntaxError, ValueError, RecursionError, MemoryError)


def split(path: str) -> tuple:
    """`module:qualname` as (module, qualname)."""
    module, _, qualname = path.partition(":")
    return module, qualname


class Source:
    """One place with modules in it. What was read is kept until `forget`."""

    def __init__(self):
        self._texts: dict = {}
        self._trees: dict = {}

    def read(self, module: str) -> bytes | None:
        """The source of a module, or None where there is no such module. Raises OSError if it cannot be read."""
        raise NotImplementedError

    def stamp(self, module: str) -> object:
        """A key that changes when the module's source may have; None where there is no such module."""
        return module

    def text(self, module: str) -> str | None:
        """The source of a module as text, or None where there is no such module.

        Raises OSError if it cannot be read, SyntaxError or ValueError if it is not text.
        """
        return self._text(module, self.stamp(module))

    def definition(self, path: str) -> ast.AST | None:
        """The syntax tree of `module:qualname`, or None where there is no such definition. Raises like `text`."""
        module, qualname = split(path)
        stamp = self.stamp(module)
        text = self._text(module, stamp)
        if text is None:
            return None
        name = qualname.partition(".")[0]
        key = (stamp, name)
        if key not in self._trees:
            self._trees[key] = parse_around(text, name)
        return find(self._trees[key], qualname)

    def fingerprint(self, path: str) -> str | None:
        """The fingerprint of `module:qualname`: None where it is missing, UNPARSED where this Python cannot parse it.

        Raises OSError if the place cannot be read.
        """
        try:
            node = self.definition(path)
            return None if node is None else fingerprint(node)
        except _NOT_PARSED:
            return UNPARSED

    def lines(self, path: str) -> list | None:
        """The lines of `module:qualname`, decorators included, or None where it is missing or cannot be parsed."""
        try:
            node = self.definition(path)
        except _NOT_PARSED:
            return None
        if node is None:
            return None
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        return self.text(split(path)[0]).split("\n")[first - 1 : node.end_lineno]

    def forget(self) -> None:
        """Drop what was read: syntax trees are large."""
        self._texts.clear()
        self._trees.clear()

    def close(self) -> None:
        """Let go of the place."""

    def _text(self, module: str, stamp: object) -> str | None:
        if stamp not in self._texts:
            data = None if stamp is None else self.read(module)
            self._texts[stamp] = None if data is None else decode_source(data)
        return self._texts[stamp]


class Tree(Source):
    """A folder that holds packages, such as `site-packages` or a checkout."""

    def __init__(self, root: Path):
        super().__init__()
        self.root = root

    def read(self, module: str) -> bytes | None:
        root, *rest = module.split(".")
        file = module_file([self.root / root], rest)
        return None if file is None else file.read_bytes()


class Wheel(Source):
    """A wheel file, of which only the members that are asked for are read."""

    def __init__(self, file: Path):
        """Raises OSError where there is no such file, or it is not a wheel."""
        super().__init__()
        try:
            self._archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise OSError(f"not a wheel: {error}") from error
        self._members = frozenset(self._archive.namelist())

    @property
    def members(self) -> frozenset:
        """The names of all files in the wheel."""
        return self._members

    def member(self, name: str) -> bytes:
        """One file of the wheel. Raises OSError if it is damaged."""
        try:
            return self._archive.read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise OSError(f"{name} in it cannot be unpacked: {error}") from error

    def read(self, module: str) -> bytes | None:
        base = module.replace(".", "/")
        for name in (f"{base}.py", f"{base}/__init__.py"):
            if name in self._members:
                return self.member(name)
        return None

    def close(self) -> None:
        self._archive.close()


def module_file(places: list, rest: list) -> Path | None:
    """The source file of a package's module: `places` are the package's folders, `rest` the names below it."""
    for place in places:
        base = Path(place, *rest)
        for candidate in (base.with_suffix(".py") if rest else base / "__init__.py", base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
