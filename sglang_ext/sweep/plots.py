"""A summary as pictures, PNG and SVG, drawn without a display."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.sweep.methods import BASELINE
from sglang_ext.sweep.plan import BATCH, RATE
from sglang_ext.sweep.result_tables import category_rows, model_name
from sglang_ext.sweep.summary import HEADLINES, Row, Spread, Summary, title

ENDINGS = ("png", "svg")
# Plain decoding is gray, so that the ten colours are for what is compared with it.
_GRAY = "0.45"
_MARKERS = "osD^vP*Xhd"
# The same input gives the same SVG, byte for byte; text stays text.
_STYLE: Mapping[Any, Any] = {
    "svg.hashsalt": "sglang-ext",
    "svg.fonttype": "none",
    "font.size": 9.0,
    "text.parse_math": False,  # a "$" in a name is a dollar
}
_PANEL_WIDTH, _PANEL_HEIGHT = 4.2, 3.2


@dataclass(frozen=True)
class Plot:
    """A picture that was written.

    Attributes:
        name: of its files, without ending.
        caption: what it shows and how to read it.
    """

    name: str
    caption: str


def write_plots(summary: Summary, folder: Path) -> list[Plot]:
    """Draw what there are results for, as NAME.png and NAME.svg in a folder, made if not there."""
    written = []
    with style():
        for plot, draw in _PLOTS:
            figure = draw(summary)
            if figure is not None:
                save(figure, folder, plot.name)
                written.append(plot)
    return written


def style() -> AbstractContextManager[Any]:
    """What figures are made and saved in."""
    import matplotlib

    return matplotlib.rc_context(dict(_STYLE))


def save(figure: Any, folder: Path, name: str) -> None:
    """Write a figure in all ENDINGS."""
    folder.mkdir(parents=True, exist_ok=True)
    for ending in ENDINGS:
        metadata = {"Date": None} if ending == "svg" else None
        path = folder / f"{name}.{ending}"
        figure.savefig(path, dpi=150, bbox_inches="tight", metadata=metadata)


def panels(rows: int, columns: int) -> tuple[Any, list[list[Any]]]:
    """A figure, and its axes by row and column."""
    from matplotlib.figure import Figure

    size = (_PANEL_WIDTH * columns, _PANEL_HEIGHT * rows + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    return figure, [list(line) for line in figure.subplots(rows, columns, squeeze=False)]


def _latency_throughput(mode: str) -> Callable[[Summary], Any]:
    """End-to-end latency and time between tokens against throughput, a column by workload."""

    def draw(summary: Summary) -> Any:
        workloads = [workload for workload, its in summary.panels() if its == mode]
        if not workloads:
            return None
        figure, axes = panels(2, len(workloads))
        shown = (
            ("median_e2e_latency_ms", "median end-to-end latency, s", 1e-3),
            ("mean_itl_ms", "mean inter-token latency, ms", 1.0),
        )
        for column, workload in enumerate(workloads):
            for line, (name, label, scale) in enumerate(shown):
                axis = axes[line][column]
                for method in summary.methods:
                    rows = summary.select(workload, mode, method)
                    pairs = _known(rows, "output_throughput", name)
                    if pairs:
                        x, y = zip(*pairs, strict=True)
                        axis.plot(x, [scale * v for v in y], **_look(summary, method))
                axis.set(xlabel="output tokens/s", ylabel=label if not column else "")
                axis.set_ylim(bottom=0)
                axis.grid(alpha=0.3)
            axes[0][column].set_title(workload)
        return _finished(figure, axes, summary)

    return draw


def _speedup_by_batch(summary: Summary) -> Any:
    """Speedup over AR against batch size, with the range of the repeats, a panel by workload."""
    workloads = [workload for workload, mode in summary.panels() if mode == BATCH]
    if not workloads or BASELINE not in summary.methods:
        return None
    figure, axes = panels(1, len(workloads))
    for axis, workload in zip(axes[0], workloads, strict=True):
        axis.axhline(1.0, color=_GRAY, linestyle="--", label=title(BASELINE))
        for method in _compared(summary):
            rows = [r for r in summary.select(workload, BATCH, method) if "speedup" in r.columns]
            if rows:
                spreads = [row.columns["speedup"] for row in rows]
                axis.errorbar(
                    [row.point.load for row in rows],
                    [spread.median for spread in spreads],
                    yerr=_errors(spreads),
                    capsize=2,
                    **_look(summary, method),
                )
        loads = sorted({row.point.load for row in summary.select(workload, BATCH)})
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads, [f"{load:g}" for load in loads])
        axis.set_xticks([], minor=True)
        axis.set(xlabel="batch size", title=workload)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("speedup over AR")
    return _finished(figure, axes, summary)


def _speedup_by_category(summary: Summary) -> Any:
    """Bars by category and method at the least load, a panel by workload with categories."""
    chosen: dict[str, Mapping[tuple[str, str], Row]] = {}
    for workload, mode in summary.panels():
        rows = [row for row in category_rows(summary, workload, mode) if "speedup" in row.columns]
        if mode == BATCH and len({row.category for row in rows}) > 1:
            chosen[workload] = {(row.category, row.point.method): row for row in rows}
    if not chosen:
        return None
    figure, axes = panels(1, len(chosen))
    most = max(len({category for category, _ in rows}) for rows in chosen.values())
    figure.set_figheight(1.2 + 0.16 * most * max(2, len(_compared(summary))))
    for axis, (workload, by_place) in zip(axes[0], chosen.items(), strict=True):
        names = sorted({category for category, _ in by_place}, reverse=True)
        methods = _compared(summary)[::-1]
        height = 0.8 / len(methods)
        for place, method in enumerate(methods):
            there = [(i, by_place[name, method]) for i, name in enumerate(names)
                     if (name, method) in by_place]  # fmt: skip
            axis.barh(
                [i + (place - (len(methods) - 1) / 2) * height for i, _ in there],
                [row.columns["speedup"].median for _, row in there],
                height,
                color=_color(summary, method),
                label=title(method),
            )
        axis.axvline(1.0, color=_GRAY, linestyle="--")
        axis.set_yticks(range(len(names)), names)
        load = next(iter(by_place.values())).point.load
        axis.set(xlabel="speedup over AR", title=f"{workload}, batch {load:g}")
    return _finished(figure, axes, summary)


def _accept_length_by_width(summary: Summary) -> Any:
    """Accept length against s_q, a panel by workload; the number beside a point is its batch."""
    modes = [(workload, BATCH) for workload, mode in summary.panels() if mode == BATCH]
    shown = [
        (workload, method, pairs)
        for workload, mode in modes
        for method in summary.methods
        if (pairs := _known(summary.select(workload, mode, method), "verify_width",
                            "accept_length", "load"))
    ]  # fmt: skip
    if not shown:
        return None
    workloads = list(dict.fromkeys(workload for workload, *_ in shown))
    figure, axes = panels(1, len(workloads))
    for axis, workload in zip(axes[0], workloads, strict=True):
        for _, method, pairs in (entry for entry in shown if entry[0] == workload):
            x, y, loads = zip(*pairs, strict=True)
            axis.plot(x, y, **_look(summary, method))
            for at in zip(x, y, loads, strict=True):
                axis.annotate(f"{at[2]:g}", at[:2], (3, 3), textcoords="offset points", fontsize=6)
        axis.set(xlabel="s_q, nodes verified per request and step", title=workload)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accept length, tokens per verify step")
    return _finished(figure, axes, summary)


_PLOTS: Sequence[tuple[Plot, Callable[[Summary], Any]]] = (
    (
        Plot(
            "latency-throughput",
            "Latency against throughput, a point per batch size. Down and to the right is better.",
        ),
        _latency_throughput(BATCH),
    ),
    (
        Plot(
            "latency-throughput-rate",
            "Latency against throughput, a point per request rate (Poisson arrivals). A line that "
            "turns upwards is a server that cannot keep up.",
        ),
        _latency_throughput(RATE),
    ),
    (
        Plot(
            "speedup-by-batch",
            "Output tokens/s by AR's at the same batch size; bars are the range of the repeats.",
        ),
        _speedup_by_batch,
    ),
    (
        Plot(
            "speedup-by-category",
            "AR's mean end-to-end latency by each method's, at the smallest batch size.",
        ),
        _speedup_by_category,
    ),
    (
        Plot(
            "accept-length",
            "Tokens committed per verify step against the nodes that it verified (s_q); the "
            "small numbers are batch sizes.",
        ),
        _accept_length_by_width,
    ),
)


def _known(rows: Sequence[Row], *names: str) -> list[tuple[float, ...]]:
    """The medians of these columns ("load": the load itself), of rows that have them all."""

    def values(row: Row) -> Iterator[float | None]:
        for name in names:
            yield row.point.load if name == "load" else row.median(name)

    found = (tuple(values(row)) for row in rows)
    return [tuple(v for v in line if v is not None) for line in found if None not in line]


def _errors(spreads: Sequence[Spread]) -> list[list[float]]:
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]


def _compared(summary: Summary) -> list[str]:
    return [name for name in summary.methods if name != BASELINE]


def _color(summary: Summary, method: str) -> str:
    if method == BASELINE:
        return _GRAY
    return f"C{_place(summary, method) % 10}"


def _place(summary: Summary, method: str) -> int:
    """In the plan, so that a method has its colour in every picture of a sweep."""
    return [name for name in summary.plan.methods if name != BASELINE].index(method)


def _look(summary: Summary, method: str) -> dict[str, Any]:
    marker = "s" if method == BASELINE else _MARKERS[_place(summary, method) % len(_MARKERS)]
    return {
        "color": _color(summary, method),
        "marker": marker,
        "markersize": 4,
        "linewidth": 2.2 if method in HEADLINES.values() else 1.2,
        "label": title(method),
    }


def _finished(figure: Any, axes: Sequence[Sequence[Any]], summary: Summary) -> Any:
    """With one legend for all panels, and the model's name."""
    entries: dict[str, Any] = {}
    for axis in (axis for line in axes for axis in line):
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    order = [label for name in summary.methods if (label := title(name)) in entries]
    figure.legend(
        [entries[label] for label in order], order, loc="outside lower center", ncols=5,
        frameon=False,
    )  # fmt: skip
    figure.suptitle(model_name(summary))
    return figure
