"""A page of docs/measured/ with what a benchmark has shown: tables, plots, the command.

Benchmarks write it with `--docs DIR`; nobody edits it by hand. Plots need the extra `sweep`.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.sweep.plots import Plot, save
from sglang_ext.sweep.provenance import collect, machine
from sglang_ext.sweep.result_tables import Table

FOLDER = "measured"


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure, drawn in `sweep.plots.style()`, with its files' name and caption."""

    plot: Plot
    figure: Any


@dataclass(frozen=True)
class ResultPage:
    """What one benchmark has shown.

    Attributes:
        name: of the page, without ending.
        title: its heading.
        findings: sentences, a bullet each; the machine and the command are added.
        reading: how to read the tables; Markdown.
        tables: in order.
        pictures: in order; they stand before the tables.
    """

    name: str
    title: str
    findings: Sequence[str]
    reading: str
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()

    def write(self, docs: Path) -> Path:
        """Write DOCS/measured/NAME.md, and its pictures beside it; returns the page's path."""
        folder = docs / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for picture in self.pictures:
            save(picture.figure, folder, picture.plot.name)
        path = folder / f"{self.name}.md"
        path.write_text(self._markdown(), encoding="utf-8")
        print(f"written: {path}")
        return path

    def _markdown(self) -> str:
        environment = collect()
        command = command_line(sys.argv)
        versions = environment["versions"]
        parts = [
            f"<!-- Made by `{command}`; not edited by hand. -->\n# {self.title}\n",
            "\n".join(f"- {finding}" for finding in self.findings) + "\n",
            f"Measured on: {machine(environment)}; SGLang {versions.get('sglang', '?')}, torch "
            f"{versions.get('torch', '?')}; {environment['started'][:10]}"
            + (f", commit {commit[:12]}" if (commit := environment.get("commit")) else "")
            + f". Again:\n\n```sh\n{command}\n```\n",
            f"## How to read it\n\n{self.reading}\n",
            "## Results\n",
            *(
                f"![{plot.caption}]({plot.name}.svg)\n\n*{plot.caption}*\n"
                for plot in (picture.plot for picture in self.pictures)
            ),
            *(table.markdown() for table in self.tables),
        ]
        return "\n".join(parts)


def add_docs_flag(parser: argparse.ArgumentParser) -> None:
    """`--docs DIR`: where the page is written; without it none is."""
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help=f"write a page of what was measured to DIR/{FOLDER}",
    )


def aligned(table: Table) -> str:
    """A table for a terminal: its title, its columns as wide as their longest cell."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([table.title, *lines, *([table.note] if table.note else [])])


def command_line(argv: Sequence[str]) -> str:
    """This process's command as one would type it: `python -m scripts.NAME ...`.

    Args:
        argv: sys.argv.
    """
    script = Path(argv[0])
    return shlex.join(["python", "-m", f"{script.parent.name}.{script.stem}", *argv[1:]])
