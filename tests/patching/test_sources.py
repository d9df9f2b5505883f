"""Sources: folders and wheels give the definitions that are in them, and say what is missing and what is not Python."""

from __future__ import annotations

import os
import zipfile

import pytest

from vllm_speedups.patching import UNPARSED, Tree, Wheel, find_in_source, fingerprint, seen_fingerprint

FILES = {
    "pkg/__init__.py": b"def top(): return 1\n",
    "pkg/mod.py": (
        b"X = 1\n\n\n@a\n@b(\n    1)\ndef f(x):\n    return x\n\n\nclass A:\n    @a\n    def m(self):\n        pass\n"
    ),
    "pkg/sub/__init__.py": b"Y = 2\n",
    "pkg/dos.py": b"\xef\xbb\xbfdef f(x):\r\n    return '''a\r\nb'''\r\n",
    "pkg/latin.py": "# coding: latin-1\ndef f(): return 'é'\n".encode("latin-1"),
    "pkg/broken.py": b"def f(:\n",
    "pkg/binary.py": b"def f(): return '\xff'\n",
    "pkg/null.py": b"f = 1\0\n",
    "pkg/deep.py": b"f = " + b"(" * 5000 + b")" * 5000 + b"\n",
    "pkg/long.py": b"f = " + b"+".join([b"1"] * 5000) + b"\n",
}


@pytest.fixture(params=["tree", "wheel"])
def source(request, tmp_path):
    if request.param == "tree":
        for name, data in FILES.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        return Tree(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for name, data in FILES.items():
            archive.writestr(name, data)
    return Wheel(tmp_path / "a.whl")


def of(text: str, name: str = "f") -> str:
    return fingerprint(find_in_source(text, name))


def test_definitions_are_found_in_modules_and_packages(source):
    assert source.fingerprint("pkg:top") == of("def top(): return 1", "top")
    assert source.fingerprint("pkg.mod:f") == of("@a\n@b(1)\ndef f(x): return x")
    assert source.fingerprint("pkg.mod:A.m") == of("@a\ndef m(self): pass", "m")
    assert source.fingerprint("pkg.mod:X") == of("X = 1", "X")
    assert source.fingerprint("pkg.sub:Y") == of("Y = 2", "Y")


def test_line_ends_and_encodings_do_not_matter(source):
    assert source.fingerprint("pkg.dos:f") == of("def f(x):\n    return 'a\\nb'\n")
    assert source.fingerprint("pkg.latin:f") == of("def f(): return 'é'")


@pytest.mark.parametrize("path", ["pkg.mod:g", "pkg.mod:A.f", "pkg.mod:f.x", "pkg.none:f", "none:f", "pkg.mod.f:f"])
def test_what_is_missing_is_none(source, path):
    assert source.fingerprint(path) is None and source.lines(path) is None


@pytest.mark.parametrize("module", ["broken", "binary", "null", "deep", "long"])
def test_what_cannot_be_parsed_is_neither_missing_nor_changed(source, module):
    assert source.fingerprint(f"pkg.{module}:f") == UNPARSED
    assert source.lines(f"pkg.{module}:f") is None or module == "long"


def test_lines_include_decorators(source):
    assert source.lines("pkg.mod:f") == ["@a", "@b(", "    1)", "def f(x):", "    return x"]
    assert source.lines("pkg.mod:A.m") == ["    @a", "    def m(self):", "        pass"]
    assert source.lines("pkg.mod:X") == ["X = 1"]


def test_a_wheel_that_is_damaged_is_an_error_and_not_a_missing_module(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("pkg/mod.py", "def f(): return 123456789\n")
    data = (tmp_path / "a.whl").read_bytes()
    (tmp_path / "a.whl").write_bytes(data.replace(b"123456789", b"123456780"))
    with pytest.raises(OSError, match=r"pkg/mod\.py"):
        Wheel(tmp_path / "a.whl").fingerprint("pkg.mod:f")
    (tmp_path / "a.whl").write_bytes(b"no zip")
    with pytest.raises(OSError, match="not a wheel"):
        Wheel(tmp_path / "a.whl")


def test_what_this_process_would_import_is_read_anew_when_it_changes(workshop):
    path = workshop.path("lib:double")
    before = seen_fingerprint(path)
    file = workshop.folder / "lib.py"
    file.write_text(file.read_text().replace("x * 2", "x * 3"))
    os.utime(file, ns=(1, 1))
    assert seen_fingerprint(path) not in (None, before)
    file.write_text("def double(:")
    assert seen_fingerprint(path) == UNPARSED
    file.unlink()
    assert seen_fingerprint(path) is None


def test_a_target_that_cannot_be_parsed_makes_its_patch_decline_with_that_reason(workshop):
    patch = workshop.patch("lib:double")
    workshop.write("lib", "def double(x) return x")
    workshop.apply(patch)
    assert patch.status == "declined" and "lib:double cannot be parsed by this Python" in patch.reason
