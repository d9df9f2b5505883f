"""Figures of the documents: tables between markers, each made from a report that a benchmark wrote into docs/figures.

    python -m vllm_speedups.bench.figures           # in a checkout: the tables anew, and the bars of the README
    python -m vllm_speedups.bench.figures --plots   # the plots too, with matplotlib (`make figures`)

Between `<!-- figures NAME -->` and `<!-- /figures -->` stands what docs/figures/NAME.json holds: the command that wrote it, and
the table that the command printed. What stands between markers of which there is no report yet is left alone, and said.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import textwrap
from pathlib import Path

from .bars import draw

FIGURES = Path("docs", "figures")
PLOTTED = ("guided", "prefix")
_MARKED = re.compile(r"<!-- figures (?P<name>[\w-]+) -->\n.*?<!-- /figures -->", re.DOTALL)


class NoFigures(ValueError):
    """Raised where a report cannot be read, with its file and why."""


def main(argv: list | None = None) -> int:
    """Render all documents of the checkout at hand. 0; 2 where a report is missing or cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m vllm_speedups.bench.figures", description=__doc__)
    parser.add_argument("--plots", action="store_true", help="draw docs/figures/NAME.png too (needs matplotlib)")
    options = parser.parse_args(argv)
    root, missing = Path.cwd(), {}
    try:
        for file in documents(root):
            text = file.read_text()
            rendered = render(text, root / FIGURES)
            if rendered != text:
                file.write_text(rendered)
                print(f"rendered {file.relative_to(root)}")
            missing.update(dict.fromkeys(unreported(text, root / FIGURES)))
    except NoFigures as error:
        print(error, file=sys.stderr)
        return 2
    for report in bars(root):
        report.with_suffix(".svg").write_text(draw(_read(report)))
    if options.plots:
        _plot(root / FIGURES)
    for name in missing:
        print(
            f"{FIGURES / name}.json is missing (`make measure` writes it): its figures are left as they are",
            file=sys.stderr,
        )
    return 2 if missing else 0


def documents(root: Path) -> list:
    """What may hold figures: the README and all pages."""
    return [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]


def bars(root: Path) -> list:
    """The reports that have bars of their own, NAME.svg beside NAME.json, for the README."""
    return sorted((root / FIGURES).glob("demo.json"))


def render(text: str, folder: Path) -> str:
    """A document with what is between markers made anew from the reports in `folder`, as far as there are any.

    Raises NoFigures.
    """
    missing = unreported(text, folder)

    def block(found: re.Match) -> str:
        name = found["name"]
        if name in missing:
            return found[0]
        report = _read(folder / f"{name}.json")
        table = textwrap.indent(_table(report).strip("\n"), "    ", lambda line: bool(line.strip()))
        table = "\n".join(line.rstrip() for line in table.splitlines())
        return f"<!-- figures {name} -->\n\n    {report['command']}\n\n{table}\n\n<!-- /figures -->"

    return _MARKED.sub(block, text)


def unreported(text: str, folder: Path) -> list:
    """The figures that a document marks and of which `folder` has no report."""
    return [
        name for name in (found["name"] for found in _MARKED.finditer(text)) if not (folder / f"{name}.json").exists()
    ]


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise NoFigures(f"{file}: {error} (`make measure` writes it)") from None


def _table(report: dict) -> str:
    name = "guided" if report["what"] == "demo" else report["what"]
    return importlib.import_module(f"{__package__}.{name}").table(report)


def _plot(folder: Path) -> None:
    from . import plots

    for file in sorted(folder.glob("*.json")):
        report = _read(file)
        if report["what"] in PLOTTED:
            getattr(plots, report["what"])(report, str(file.with_suffix(".png")))
            print(f"drew {file.with_suffix('.png').name}")


if __name__ == "__main__":
    sys.exit(main())
