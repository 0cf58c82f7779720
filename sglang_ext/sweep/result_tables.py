"""A summary as tables: Markdown for people, CSV with every column for programs."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.sweep.methods import BASELINE
from sglang_ext.sweep.plan import BATCH
from sglang_ext.sweep.quality import QUALITIES
from sglang_ext.sweep.run_metrics import COLUMNS
from sglang_ext.sweep.summary import Row, Spread, Summary, title

MARKDOWN, CSV = "summary.md", "summary.csv"
UNKNOWN = "-"
DERIVED = ("speedup", "equal_outputs_percent")
# In the tables of one load, beside which a summary.csv has all.
DETAILS = (
    "output_throughput", "speedup", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms",
    "p90_itl_ms", "p99_itl_ms", "median_e2e_latency_ms", "p90_e2e_latency_ms",
    "p99_e2e_latency_ms", "accept_length", "verify_width", "cpu_s_per_1k_tokens", "memory_mb",
    "equal_outputs_percent", *QUALITIES,
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns; the first column is on the left, numbers are on the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self, level: int = 3) -> str:
        """With its title as a heading of this level."""
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [f"{'#' * level} {self.title}", ""]
        lines += [f"{self.note}\n"] if self.note else []
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        rows.insert(1, rule)
        lines += [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join(lines) + "\n"


def write_tables(summary: Summary, folder: Path) -> None:
    """Write summary.md and summary.csv."""
    (folder / MARKDOWN).write_text(markdown(summary), encoding="utf-8")
    (folder / CSV).write_text(to_csv(summary), encoding="utf-8")


def markdown(summary: Summary) -> str:
    """All tables, and what went wrong."""
    parts = [f"# Sweep of {model_name(summary)}\n", f"{described(summary)}\n"]
    if summary.problems:
        parts.append("\n".join(["Problems:\n", *(f"- {p}" for p in summary.problems)]) + "\n")
    shown = [f"- {name}: {figure_text(value)}" for name, value in summary.figures().items()]
    parts.append("\n".join(shown) + "\n")
    tables = (*overview(summary), *categories(summary), *details(summary))
    return "\n".join([*parts, *(table.markdown(level=2) for table in tables)])


def described(summary: Summary) -> str:
    """A sweep in a sentence or two."""
    plan = summary.plan
    loads = [f"batch {', '.join(map(str, plan.batches))}"] if plan.batches else []
    loads += [f"{', '.join(f'{r:g}' for r in plan.rates)} requests/s"] if plan.rates else []
    text = (
        f"{' and '.join(loads)}; up to {plan.prompts} prompts of each workload, up to "
        f"{plan.max_tokens} tokens each (of texts at least half as many, by chance), greedy; "
    )
    unfinished = summary.runs < summary.planned
    text += f"medians of {'up to ' if unfinished else ''}{plan.repeats} repeats"
    if plan.most_repeats > plan.repeats:
        text += f", of up to {plan.most_repeats} where two methods are close"
    if plan.minutes:
        text += f", as many as fit into {plan.minutes:g} minutes"
    text += "."
    if unfinished:
        text += f" Unfinished: {summary.runs} of {summary.planned} runs."
    return text[0].upper() + text[1:]


def overview(summary: Summary) -> Iterator[Table]:
    """Speed of all methods at all loads, a table by workload and mode."""
    for workload, mode in summary.panels():
        rows = summary.select(workload, mode)
        loads = sorted({row.point.load for row in rows})
        if mode == BATCH:
            what, column = "output tokens/s", "output_throughput"
            head = [f"batch {load:g}" for load in loads]
        else:
            what, column = "mean end-to-end latency, ms", "mean_e2e_latency_ms"
            head = [f"{load:g} requests/s" for load in loads]
        cells = {(row.point.method, row.point.load): _speed_cell(row, column) for row in rows}
        yield Table(
            f"{workload}: {what}",
            ("method", *head),
            [
                (title(name), *(cells.get((name, load), UNKNOWN) for load in loads))
                for name in summary.methods
            ],
            "Median ± spread (half of the range of the repeats), and the speedup over AR.",
        )


def categories(summary: Summary) -> Iterator[Table]:
    """Speedup by category at the least load, a table by workload that has more than one."""
    for workload, mode in summary.panels():
        rows = category_rows(summary, workload, mode)
        names = list(dict.fromkeys(row.category for row in rows))
        methods = [name for name in summary.methods if name != BASELINE]
        cells = {(row.category, row.point.method): row for row in rows}
        if len(names) < 2 or not any("speedup" in row.columns for row in rows):
            continue
        load = f"{'batch' if mode == BATCH else 'rate'} {rows[0].point.load:g}"
        yield Table(
            f"{workload}, {load}: speedup by category",
            ("category", *map(title, methods)),
            [
                (name, *(_times(cells.get((name, method))) for method in methods))
                for name in sorted(names)
            ],
            "Of the mean end-to-end latency over AR's.",
        )


def category_rows(summary: Summary, workload: str, mode: str) -> list[Row]:
    """Category rows of a workload at its least load, where requests disturb each other least."""
    rows = [
        row
        for row in summary.categories
        if (row.point.workload, row.point.mode) == (workload, mode)
    ]
    least = min((row.point.load for row in rows), default=0.0)
    return [row for row in rows if row.point.load == least]


def details(summary: Summary) -> Iterator[Table]:
    """The columns of DETAILS, a table by workload, mode and load."""
    for workload, mode in summary.panels():
        rows = summary.select(workload, mode)
        for load in sorted({row.point.load for row in rows}):
            here = [row for row in rows if row.point.load == load]
            known = [name for name in DETAILS if any(name in row.columns for row in here)]
            yield Table(
                f"{workload}, {'batch' if mode == BATCH else 'rate'} {load:g}",
                ("method", *known),
                [(title(row.point.method), *(_cell(row, name) for name in known)) for row in here],
            )


def to_csv(summary: Summary) -> str:
    """A line per point: medians, and after all of them the spread of each, in percent."""
    names = [*COLUMNS, *QUALITIES, *DERIVED]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    places = ("workload", "method", "max_concurrency", "request_rate", "repeats")
    writer.writerow([*places, *names, *(f"{name}_spread_percent" for name in names)])
    for row in summary.rows:
        point = row.point
        load = f"{point.load:g}"
        loads = (load, "") if point.mode == BATCH else ("", load)
        columns = [row.columns.get(name) for name in names]
        writer.writerow(
            [point.workload, point.method, *loads, len(row.by_repeat), *_values(columns)]
        )
    return text.getvalue()


def model_name(summary: Summary) -> str:
    """The model's name, without the folder it lies in."""
    return Path(summary.plan.model).name


def figure_text(value: object) -> str:
    """A figure for people."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """To three digits or so, so that a column can be read."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f}"


def _values(columns: Iterable[Spread | None]) -> list[str]:
    there = list(columns)
    medians = ["" if c is None else f"{c.median:.6g}" for c in there]
    return medians + ["" if c is None or c.count < 2 else f"{c.percent:.3g}" for c in there]


def _cell(row: Row, name: str) -> str:
    value = row.median(name)
    if value is None:
        return UNKNOWN
    return f"{value:.2f}x" if name == "speedup" else number(value)


def _speed_cell(row: Row, column: str) -> str:
    if column not in row.columns:
        return UNKNOWN
    spread = row.columns[column]
    text = number(spread.median)
    if spread.count > 1:
        text += f" ±{spread.percent:.1f}%"
    return f"{text} ({_times(row)})" if "speedup" in row.columns else text


def _times(row: Row | None) -> str:
    return UNKNOWN if row is None else _cell(row, "speedup")
