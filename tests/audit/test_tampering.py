"""No false "applied": whichever target, premise or library of a release is another, the patch declines and names it."""

from __future__ import annotations

import ast

import pytest
from unpacked import CONTRACTS, FACTS_NOW, applied, folders, opened

from vllm_speedups.audit import judge
from vllm_speedups.patching import APPLIED, DECLINED, UNPARSED, Source
from vllm_speedups.patching.fingerprint import find

APPLIES = applied()


def seen_in(name: str, version: str) -> dict:
    return {path: FACTS_NOW.fingerprint(path, version) for path in CONTRACTS[name].paths()}


def on_facts(name: str, version: str, seen: dict, library=None):
    asked = library or (lambda one: FACTS_NOW.library(one, version))
    return judge(CONTRACTS[name], version, seen.get, asked)


def relies_elsewhere(name: str, verdict, path: str) -> bool:
    """Whether a patch applies in a form that does without a definition: hashers without xxhash, where that is another."""
    return verdict.status == APPLIED and not any(
        path in form.paths() for form in CONTRACTS[name].forms if form.name == verdict.form
    )


def test_each_target_and_premise_of_each_release_that_is_another_declines_and_is_named():
    assert len(APPLIES) > 50
    for name, version in APPLIES:
        seen = seen_in(name, version)
        form = next(form for form in CONTRACTS[name].forms if form.name == on_facts(name, version, seen).form)
        for path in form.paths():
            for other in ("0" * 64, seen[path][:-1] + ("0" if seen[path][-1] != "0" else "1"), None, UNPARSED):
                verdict = on_facts(name, version, {**seen, path: other})
                if not relies_elsewhere(name, verdict, path):
                    assert verdict.status == DECLINED, (name, version, path, other)
                    if len(CONTRACTS[name].forms) == 1:
                        assert [difference.path for difference in verdict.differences] == [path]


def test_a_definition_as_another_release_has_it_applies_only_where_a_form_lists_all_together():
    for name, version in APPLIES:
        seen = seen_in(name, version)
        for path in seen:
            for other in set(FACTS_NOW.seen[path].values()) - {seen[path]}:
                mixed = {**seen, path: other}
                forms = (form.paths() for form in CONTRACTS[name].forms)
                listed = any(all(mixed.get(one) in known for one, known in form.items()) for form in forms)
                assert (on_facts(name, version, mixed).status == APPLIED) is listed, (name, version, path)


@pytest.mark.parametrize("name", [name for name, contract in CONTRACTS.items() if contract.libraries])
def test_a_library_of_another_version_declines_in_one_line_that_names_it_and_those_that_were_proven(name):
    (version, *_) = [release for patch, release in APPLIES if patch == name]
    for library, proven in CONTRACTS[name].libraries.items():
        for there in ("==0.0.1", "==99.0", f"=={proven[0]}.dev1", f"<{proven[0]}"):
            verdict = on_facts(name, version, seen_in(name, version), {library: there}.get)
            assert verdict.status == DECLINED, there
            (line,) = verdict.reasons
            assert library in line and there.lstrip("=") in line and all(one in line for one in proven)
        for there in [None, *(f"=={one}" for one in proven), f">={proven[0]}"]:
            assert on_facts(name, version, seen_in(name, version), {library: there}.get).status == APPLIED, there


class Tampered(Source):
    """A release in which one definition is another: in memory, nothing is written."""

    def __init__(self, whole: Source, path: str, change):
        super().__init__()
        self.whole, self.path, self.change = whole, path, change

    def read(self, module: str) -> bytes | None:
        data = self.whole.read(module)
        home, _, qualname = self.path.partition(":")
        if module != home or data is None:
            return data
        tree = ast.parse(data)
        self.change(find(tree, qualname))
        return ast.unparse(ast.fix_missing_locations(tree)).encode()


def grown(node: ast.AST) -> None:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        node.value = ast.Tuple([node.value], ast.Load())
    else:
        node.body.append(ast.parse("_tampered = 1").body[0])


def shrunk(node: ast.AST) -> None:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        node.value = ast.Constant(None)
    else:
        node.body[-1] = ast.Pass() if not isinstance(node.body[-1], ast.Pass) else ast.Continue()


@pytest.mark.parametrize("version", folders())
def test_each_target_and_premise_that_is_changed_in_a_releases_own_source_declines_and_is_named(version):
    release = opened(version)
    for name, contract in CONTRACTS.items():
        whole = judge(contract, version, release.fingerprint, release.library)
        if (name, version) not in APPLIES:
            assert whole.status != APPLIED
            continue
        assert whole.status == APPLIED, whole.reasons
        seen = {path: release.fingerprint(path) for path in contract.paths()}
        form = next(form for form in contract.forms if form.name == whole.form)
        for path in form.paths():
            home = path.partition(":")[0]
            for change in (grown, shrunk):
                tampered = Tampered(release.source, path, change)
                after = {
                    one: tampered.fingerprint(one) if one.partition(":")[0] == home else digest
                    for one, digest in seen.items()
                }
                inside = {one for one in seen if one == path or path.startswith(f"{one}.")}
                assert {one for one in seen if after[one] != seen[one]} == inside, (path, change)
                verdict = judge(contract, version, after.get, release.library)
                if not relies_elsewhere(name, verdict, path):
                    assert verdict.status == DECLINED, (name, path, change)
                    assert path in " ".join(verdict.reasons) or len(contract.forms) > 1
