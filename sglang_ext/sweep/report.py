"""The report of a results folder: tables, plots, figures.json, and one HTML file with all of it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sglang_ext.sweep.plots import Plot, write_plots
from sglang_ext.sweep.result_tables import (
    Table,
    categories,
    described,
    details,
    figure_text,
    model_name,
    overview,
    write_tables,
)
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.summary import Summary, summarize

HTML, FIGURES, PLOTS = "report.html", "figures.json", "plots"
# In environment.json beside the machine; too long for a table.
_ELSEWHERE = ("forward_costs",)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1, h2, h3 { line-height: 1.2; }
table { border-collapse: collapse; font-size: 0.87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.table { overflow-x: auto; }
.note, figcaption { color: #555; font-size: 0.87rem; }
.problems { background: #fff3cd; padding: 0.5rem 1rem; }
figure { margin: 1.5rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
"""


def write_report(folder: Path) -> Summary:
    """Write summary.md, summary.csv, plots/, figures.json and report.html into a results folder.

    Returns:
        What they show.

    Raises:
        ResultsError: there are no results, or they cannot be read.
    """
    summary = summarize(Results.read(folder))
    write_tables(summary, folder)
    figures = json.dumps({"figures": summary.figures()}, indent=2)
    (folder / FIGURES).write_text(figures + "\n", encoding="utf-8")
    plots = write_plots(summary, folder / PLOTS)
    page = html(summary, [(plot, _svg(folder / PLOTS / f"{plot.name}.svg")) for plot in plots])
    (folder / HTML).write_text(page, encoding="utf-8")
    return summary


def html(summary: Summary, pictures: Sequence[tuple[Plot, str]]) -> str:
    """A page that needs nothing else.

    Args:
        pictures: each with its SVG element.
    """
    name = f"Sweep of {model_name(summary)}"
    parts = [f"<h1>{escape(name)}</h1>", f"<p>{escape(described(summary))}</p>"]
    if summary.problems:
        problems = "".join(f"<li>{escape(problem)}</li>" for problem in summary.problems)
        parts.append(f'<div class="problems"><b>Problems</b><ul>{problems}</ul></div>')
    figures = [(key, figure_text(value)) for key, value in summary.figures().items()]
    parts.append(_table(Table("Figures", ("figure", "value"), figures)))
    parts += [
        f"<figure>{svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"
        for plot, svg in pictures
    ]
    parts += map(_table, (*overview(summary), *categories(summary)))
    parts.append(_folded("All columns by load", map(_table, details(summary))))
    parts.append(_folded("Environment", [_table(environment_table(summary))]))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def environment_table(summary: Summary) -> Table:
    """Where it was measured, and the plan."""
    known = {k: v for k, v in summary.environment.items() if k not in _ELSEWHERE}
    rows = list(_flat({"plan": summary.plan.to_json()} | known))
    return Table("Environment", ("what", "value"), rows)


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested objects as "outer.inner"; lists as one text."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield prefix + key, " ".join(map(str, value))
        elif value is not None:
            yield prefix + key, str(value)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2>{note}<div class="table"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
    )


def _folded(title: str, parts: Iterable[str]) -> str:
    return f"<details><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def _svg(path: Path) -> str:
    """The svg element of a file, without what precedes it there."""
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]
