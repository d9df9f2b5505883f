"""The documents: links lead to files and headings that are there, and every page is in the site's navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_speedups.plugin import discover

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<text>.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|^    .*?$", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set:
    """What headings are called in links, by code hosts and by MkDocs alike: words and hyphens."""
    found = set()
    for heading in HEADING.finditer(prose(page)):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading["text"]).strip().lower()
        found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text)))
    return found


def broken(page: Path, text: str) -> list:
    """The relative links of `text`, standing in `page`, that lead nowhere."""
    found = []
    for link in LINK.finditer(text):
        name, _, anchor = link["target"].partition("#")
        if "://" in name or name.startswith("mailto:"):
            continue
        file = (page.parent / name).resolve() if name else page
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            found.append(link["target"])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    assert not broken(page, prose(page))


def test_a_link_that_leads_nowhere_is_found():
    page = ROOT / "docs" / "index.md"
    wrong = ["nowhere.md", "settings.md#nowhere", "#nowhere", "../docs"]
    right = ["settings.md#settings", "#start-here", "../README.md", "https://example.org/nowhere.md"]
    assert broken(page, " ".join(f"[a]({target})" for target in wrong + right)) == wrong


def test_every_page_is_in_the_navigation_and_the_navigation_has_no_other():
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").glob("**/*.md")]
    assert sorted(listed) == sorted(pages), "mkdocs.yml: nav lists every page once, and start from docs/index.md too"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_patch_is_named_where_people_begin(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [patch.name for patch in discover() if f"`{patch.name}`" not in text]
