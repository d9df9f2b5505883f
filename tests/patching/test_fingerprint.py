"""Fingerprints follow what code does: blind to how it is written down, alert to all else, alike in every Python."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vllm_speedups.patching import find, find_in_source, fingerprint
from vllm_speedups.patching import fingerprint as fingerprint_function

BASE = '''
def f(a, b: int = 1, *args, c=None, **kwargs) -> int:
    """Documented."""
    total: int = 0
    for i in range(a):  # a comment
        if i % 2 == 0 and i != b:
            total += i * 2.5
        else:
            total -= g(i, key='x')[1:3]
    return f"{total!r:>5}" if c is None else {"a": 1, **kwargs}
'''


def of(source: str, name: str = "f") -> str:
    node = find_in_source(textwrap.dedent(source), name)
    assert node is not None
    return fingerprint(node)


def changed(old: str, new: str) -> str:
    assert BASE.count(old) >= 1
    return BASE.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    """Documented."""\n', ""),
        ("Documented", "Documented otherwise"),
        ("  # a comment", ""),
        ("  # a comment", "  # type: ignore"),
        (": int = 1", "=1"),
        (" -> int", ' -> "str"'),
        ("total: int = 0", "total: float = 0"),
        ("range(a)", "range(\n        a,\n    )"),
        ("i % 2 == 0 and i != b", "((i % 2) == 0) and (i != b)"),
        ("'x'", '"x"'),
        ("'x'", "u'x'"),
        ("'x'", "'\\x78'"),
        ("2.5", "2.50"),
        ("b: int", "b:int"),
        ("\n    total: int", "\n\n\n    total: int"),
        ("def f", "import os\n\n\ndef f"),
    ],
)
def test_how_a_definition_is_written_down_does_not_matter(old, new):
    assert of(changed(old, new)) == of(BASE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a, b", "b, a"),
        ("int = 1", "int = 2"),
        ("int = 1", "int = True"),
        ("int = 1", "int = 1.0"),
        ("= 1,", "= '1',"),
        ("'x'", "b'x'"),
        ("*args, c", "*, c"),
        ("c=None", "c"),
        ("c=None", "c=False"),
        (", **kwargs) ->", ") ->"),
        ("range(a)", "range(a, 9)"),
        ("% 2", "// 2"),
        ("== 0", "is 0"),
        (" and ", " or "),
        ("!= b", "!= a"),
        ("i * 2.5", "2.5 * i"),
        ("+=", "-="),
        ("else:\n            total", "if True:\n            total"),
        ("key=", "kee="),
        ("[1:3]", "[1:]"),
        ("[1:3]", "[:3]"),
        ("[1:3]", "[1:3:1]"),
        ("!r", "!s"),
        (">5", "<5"),
        ("c is None", "c is not None"),
        ("**kwargs}", "'b': kwargs}"),
        ("for i", "for j"),
        ("return", "yield"),
        ("def f", "async def f"),
        ("def f", "@g\ndef f"),
        ("g(i", "g(*i"),
        ("    for i", "    pass\n    for i"),
    ],
)
def test_every_change_of_behaviour_matters(old, new):
    assert of(changed(old, new)) != of(BASE)


def test_a_docstring_is_only_the_first_statement():
    assert of("def f():\n    'a'\n    'b'\n    return 1") != of("def f():\n    'a'\n    'c'\n    return 1")
    assert of("def f():\n    'a'\n    return 1") == of("def f():\n    return 1")
    assert of("def f():\n    b'a'\n    return 1") != of("def f():\n    return 1")


def test_none_keeps_its_place():
    assert of("def f(*, a, b=1): pass") != of("def f(*, a=1, b): pass")
    assert of("f = {**a, 'b': c}") != of("f = {'b': c, **a}")
    assert of("def f(): return None") != of("def f(): return")


def test_docstrings_of_everything_within_are_left_out():
    assert of("class f:\n    'a'\n    def m(self):\n        'b'\n        return 1") == of(
        "class f:\n    def m(self):\n        return 1"
    )


def vllm_sources() -> list:
    """A few real files of the installed vLLM, found without importing it."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return []
    names = (
        "v1/structured_output/utils.py",
        "v1/structured_output/backend_outlines.py",
        "v1/structured_output/backend_xgrammar.py",
        "v1/structured_output/backend_guidance.py",
        "v1/core/kv_cache_utils.py",
        "v1/core/sched/output.py",
        "v1/utils.py",
        "utils/hashing.py",
    )
    root = Path(spec.origin).parent
    return [root / name for name in names if (root / name).is_file()]


def definitions(tree: ast.Module) -> dict:
    """Every top-level definition and method: qualname -> node."""
    found = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = find(tree, node.name)
            for inner in getattr(node, "body", ()):
                if isinstance(node, ast.ClassDef) and isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found[f"{node.name}.{inner.name}"] = find(tree, f"{node.name}.{inner.name}")
    return found


class Bare(ast.NodeTransformer):
    """Takes docstrings and annotations out."""

    def _undocumented(self, node):
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()] if not isinstance(node, ast.Module) else node.body[1:]
        if hasattr(node, "returns"):
            node.returns = None
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Module = _undocumented

    def visit_arg(self, node):
        node.annotation = None
        return node


@pytest.mark.parametrize("file", vllm_sources(), ids=lambda file: file.name)
def test_real_code_printed_anew_has_the_same_fingerprints(file):
    tree = ast.parse(file.read_bytes())
    expected = {name: fingerprint(node) for name, node in definitions(tree).items()}
    again = ast.parse(ast.unparse(tree))
    assert {name: fingerprint(node) for name, node in definitions(again).items()} == expected
    bare = ast.parse(ast.unparse(ast.fix_missing_locations(Bare().visit(copy.deepcopy(tree)))))
    found = {name: fingerprint(node) for name, node in definitions(bare).items()}
    only_documented = {name for name, node in definitions(bare).items() if "Pass()" in ast.dump(node)}
    assert {name for name in expected if found[name] != expected[name]} <= only_documented


def mutants(node: ast.AST):
    """Change one thing at a time, in place, and yield."""
    for inner in ast.walk(node):
        for name in ("id", "attr", "arg", "name"):
            value = getattr(inner, name, None)
            if isinstance(value, str):
                setattr(inner, name, value + "_")
                yield f"{type(inner).__name__}.{name} {value}"
                setattr(inner, name, value)
        if isinstance(inner, ast.Constant):
            value, inner.value = inner.value, ("other", inner.value)
            yield f"constant {value!r}"
            inner.value = value
        for name in ("body", "orelse", "args", "keywords", "values", "elts", "targets", "generators", "ifs"):
            value = getattr(inner, name, None)
            if isinstance(value, list) and value:
                last = value.pop()
                yield f"{type(inner).__name__}.{name} without its last"
                value.append(last)


def without_notes(node: ast.AST) -> ast.AST:
    """A copy without docstrings and annotations, whose every remaining node says something."""
    for inner in ast.walk(bare := Bare().visit(copy.deepcopy(node))):
        if isinstance(inner, ast.AnnAssign):
            inner.annotation = ast.Tuple(elts=[], ctx=ast.Load())
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and not inner.body:
            inner.body = [ast.Pass()]
    return bare


@pytest.mark.parametrize("file", vllm_sources()[:2], ids=lambda file: file.name)
def test_any_one_change_to_real_code_changes_its_fingerprint(file):
    nodes = definitions(ast.parse(file.read_bytes()))
    tried = 0
    for name in [name for name in nodes if name.partition(".")[0] in ("OutlinesGrammar", "apply_grammar_bitmask")]:
        node = without_notes(nodes[name])
        expected = fingerprint(node)
        assert expected == fingerprint(nodes[name])
        for what in mutants(node):
            tried += 1
            assert fingerprint(node) != expected, f"{name}: {what}"
        assert fingerprint(node) == expected
    assert tried > 200


def test_definitions_are_found_wherever_they_are_nested():
    source = """
    if TYPE_CHECKING:
        from x import f
    else:
        def f(): return 1
    try:
        import fast
        def g(): return 2
    except ImportError:
        def g(): return 3
    finally:
        h = 4
    class A:
        class B:
            if True:
                def m(self): return 5
                limit: int = 6
    with open("x") as file:
        def inside(): return 7
    for _ in range(3):
        async def waits(): return 8
    """
    assert of(source, "f") == of("def f(): return 1")
    assert of(source, "g") == of("def g(): return 3", "g")
    assert of(source, "h") == of("h = 4", "h")
    assert of(source, "A.B.m") == of("def m(self): return 5", "m")
    assert of(source, "A.B.limit") == of("limit: str = 6", "limit")
    assert of(source, "inside") == of("def inside(): return 7", "inside")
    assert of(source, "waits") == of("async def waits(): return 8", "waits")


def test_the_last_of_several_definitions_counts_and_missing_ones_are_none():
    assert of("def f(): return 1\ndef f(): return 2") == of("def f(): return 2")
    assert of("f = 1\ndef f(): return 2\nf = 3") == of("f = 3")
    for name in ("nothing", "f.nothing", "nothing.f"):
        assert find_in_source("def f(): return 1", name) is None
    with pytest.raises(SyntaxError):
        find_in_source("def f(:", "f")


SYNTAX = """
def strings(x, w):
    return (
        "a" "b" f"c{x}" f"{x!r:>{w}}" f"{x=}" f"{{}}" f"{x:%H:%M}" f"{x:}" f"{f'{w}'}" f"{x}{w}" "tail",
        u"u", b"\\x00b", r"\\d", "é日本", "\\U0001fae0🫠\U0001fae8\\ud800", "\\N{BULLET}", "",
    )

def numbers():
    return 1_000, 0x10, 1e400, 1e-5, 0.1, 1j, -0.0, ..., True, None, 10**30, 123456789012345678901234567890

def calls(a, /, b, *c, d, e=1, **f):
    return a(*b, *c, d=d, **e, **f), lambda x, *y, z=1: (x, y, z), (n := 3), not a, -b, ~a, a @ b

async def waits(a):
    async with a as b, a:
        async for c in b:
            yield [d async for d in c if await d]

@property
@a.b(c=1)
class K(A, metaclass=M):
    x: int
    y: "str" = 1
    (z): int = 2
    a.b: int = 3
    def m(self): nonlocal_ = 1; del nonlocal_

def flow(a):
    global g
    try:
        assert a, "m"
        raise X from a
    except (A, B) as e:
        pass
    except:
        return
    else:
        a[1:2, ::3, ...] = a[b][c] = d, *e = {1, 2}, {**a, 1: 2}, [i for i in a for j in i if j if i]
    finally:
        while a: break
        else: a[0] += 1
    with (a): pass
    return {k: v for k, v in a}, (i for i in a), a if b else c, a < b <= c is not d not in e

from a import b as c, d
def generic(x: list[int] | None = None) -> "T": return x
"""

SCRIPT = """
import ast, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("fingerprint_alone", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
result = {}
for file in sys.argv[2:]:
    try:
        tree = ast.parse(open(file, "rb").read())
    except SyntaxError:
        continue
    result[file] = [(node.lineno, module.fingerprint(node)) for node in ast.walk(tree) if isinstance(node, ast.stmt)]
print(json.dumps(result))
"""


def interpreters() -> list:
    found = {}
    for python in sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")):
        parts = python.parent.parent.name.split(".")
        if parts[1].isdigit() and int(parts[1]) >= 9 and tuple(map(int, parts[:2])) != sys.version_info[:2]:
            found[".".join(parts[:2])] = str(python)
    return [pytest.param(found.get(version), id=version) for version in ("3.9", "3.10", "3.11", "3.12", "3.13")]


@pytest.mark.parametrize("python", interpreters())
def test_every_python_computes_the_same_fingerprints(python, tmp_path):
    if python is None:
        pytest.skip("no such interpreter beside this one")
    odd = tmp_path / "odd.py"
    odd.write_text(SYNTAX, encoding="utf-8")
    files = [str(odd), *map(str, vllm_sources())]
    module = sys.modules[fingerprint_function.__module__].__file__
    answers = []
    for interpreter in (python, sys.executable):
        command = [interpreter, "-I", "-W", "ignore", "-c", SCRIPT, module, *files]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    theirs, ours = answers
    assert str(odd) in theirs and len(ours[str(odd)]) > 30
    for file, found in theirs.items():
        assert found == ours[file], file
