"""docs/performance.md, made from a results folder: what was measured, how to read it, and why."""

import inspect
import shlex
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.sweep.methods import METHODS
from sglang_ext.sweep.peer_section import put_section
from sglang_ext.sweep.plan import Plan
from sglang_ext.sweep.plots import ENDINGS, Plot, save, style, write_plots
from sglang_ext.sweep.provenance import machine
from sglang_ext.sweep.result_tables import (
    CSV,
    Table,
    categories,
    described,
    details,
    model_name,
    overview,
    to_csv,
)
from sglang_ext.sweep.results import Results
from sglang_ext.sweep.roofline import Costs, break_even_table, costs_of, draw_roofline
from sglang_ext.sweep.summary import Summary, summarize, title
from sglang_ext.sweep.workloads import WORKLOADS

PAGE, PICTURES = "performance.md", "performance"
ROOFLINE = Plot(
    "roofline",
    "Left: what a forward pass costs by its tokens. Right: the accept length at which a verify "
    "step is as fast as plain decoding, by s_q and batch size; stars above their line gain.",
)
_READING = """\
- **Output tokens/s** are those of the whole run, prefill included: all prompts are given at once,
  and *batch* is how many of them are in flight. To its right: half of the range of
  the repeats, and the speedup over AR, the median of the ratios repeat by repeat.
- **Latency against throughput**: every line runs from the smallest batch to the largest. Lower is a
  faster answer, further to the right is more of them; a method is worth having where its line is
  below and to the right of AR's.
- **Accept length** is what a step commits per request, **s_q** what it verifies. Peers verify all
  that they draft; SSSD verifies what pays ([budget.md](budget.md)), so its s_q falls as the batch
  grows, and its accept length with it.
- The other columns are SGLang's bench_serving's; [sweep.md](sweep.md) has the list."""
_BEND = """\
A pass of few tokens takes about as long as reading the weights; drafted tokens ride along. Past
I_knee every token is paid for. A batch of requests uses up the free tokens by itself: what is left
for drafts is about I_knee / batch a request. A verify step pays if it commits more tokens than it
costs plain steps."""


def write_performance(folder: Path, docs: Path) -> None:
    """Write DOCS/performance.md, and its pictures and CSV into DOCS/performance/.

    Raises:
        ResultsError: there are no results in `folder`, or they cannot be read.
    """
    summary = summarize(Results.read(folder))
    pictures = docs / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    # What an earlier sweep has drawn and this one does not.
    for path in (p for ending in ENDINGS for p in pictures.glob(f"*.{ending}")):
        path.unlink()
    plots = write_plots(summary, pictures)
    costs = costs_of(summary.environment)
    if costs is not None:
        with style():
            save(draw_roofline(costs, summary), pictures, ROOFLINE.name)
    (pictures / CSV).write_text(to_csv(summary), encoding="utf-8")
    (docs / PAGE).write_text(page(summary, plots, costs), encoding="utf-8")
    put_section(docs)


def page(summary: Summary, plots: list[Plot], costs: Costs | None) -> str:
    """performance.md.

    Args:
        plots: that are in docs/performance/.
    """
    by_name = {plot.name: plot for plot in plots}

    def picture(name: str) -> list[str]:
        return [_picture(by_name[name])] if name in by_name else []

    parts = [
        "<!-- Made by `sglang-ext sweep report DIR --performance docs`; not edited by hand. -->\n"
        f"# Performance\n\n{model_name(summary)}, {machine(summary.environment)}. "
        f"{described(summary)}\n",
        *_findings(summary),
        *_problems(summary),
        "## How to read it\n\n" + _READING + "\n",
        "## Results\n",
        *picture("latency-throughput"),
        *picture("speedup-by-batch"),
        *(table.markdown() for table in overview(summary)),
        *picture("latency-throughput-rate"),
    ]
    by_category = list(categories(summary))
    if by_category:
        parts += ["## By category\n", *picture("speedup-by-category")]
        parts += [table.markdown() for table in by_category]
    if "accept-length" in by_name:
        parts += ["## Accept length and s_q\n", *picture("accept-length")]
    if costs is not None:
        parts += [f"## Why speculation pays, and at which batch\n\n{_BEND}\n", _bend(costs)]
        parts += [_picture(ROOFLINE), break_even_table(costs, summary.plan.batches).markdown()]
    parts += ["## Latencies at the smallest and the largest load\n"]
    parts += [table.markdown() for table in _ends(summary)]
    parts += [f"All loads and columns: [{CSV}]({PICTURES}/{CSV}).\n"]
    parts += ["## What was measured\n", *_measured(summary)]
    return "\n".join(parts)


def _findings(summary: Summary) -> Iterator[str]:
    figures, found = summary.figures(), []
    if (ratio := figures.get("min_ratio_sssd_vs_ar")) is not None:
        found.append(f"SSSD live by AR, output tokens/s: {ratio:.2f} at the least.")
    if (ratio := figures.get("min_ratio_sssd_vs_best_ngram_peer")) is not None:
        found.append(
            f"SSSD live by the best n-gram peer, on MT-Bench and GSM8K: {ratio:.2f} at the least."
        )
    if (spread := figures.get("spread_percent")) is not None:
        middle = figures["spread_percent_median"]
        found.append(f"Spread of the repeats: {middle:.1f}% in the median, {spread:.1f}% at most.")
    if (limit := figures.get("speedup_agreement_percent")) is not None:
        found.append(
            f"Another such sweep has the same speedups within {limit:.1f}%, with 95% probability "
            "for all of them."
        )
    if (share := figures.get("equal_outputs_percent")) is not None:
        found.append(f"Outputs that are AR's, token for token: {share:.1f}%.")
    if found:
        yield "\n".join(f"- {line}" for line in found) + "\n"


def _problems(summary: Summary) -> Iterator[str]:
    if summary.problems:
        yield "What went wrong:\n\n" + "\n".join(f"- {p}" for p in summary.problems) + "\n"


def _bend(costs: Costs) -> str:
    one, most = next(iter(costs.seconds)), max(costs.seconds)
    return (
        f"Here I_knee is {costs.knee} tokens: {one} token takes {1e3 * costs.seconds[one]:.1f} ms "
        f"in the linear layers, {most} take {1e3 * costs.seconds[most]:.0f} ms.\n"
    )


def _ends(summary: Summary) -> Iterator[Table]:
    tables = list(details(summary))
    for workload, mode in summary.panels():
        loads = sorted({row.point.load for row in summary.select(workload, mode)})
        here, tables = tables[: len(loads)], tables[len(loads) :]
        yield here[0]
        if len(here) > 1:
            yield here[-1]


def _measured(summary: Summary) -> Iterator[str]:
    plan, environment = summary.plan, summary.environment
    lines = [
        f"- `{name}`: {_first_paragraph(WORKLOADS[name])}{_size(summary, name)}"
        for name in plan.workloads
        if name in WORKLOADS
    ]
    yield "Workloads ([sweep.md](sweep.md)):\n\n" + "\n".join(lines) + "\n"
    with_corpus = [title(m) for m in summary.methods if m in METHODS and METHODS[m].corpus]
    yield (
        f"Methods: {', '.join(map(title, summary.methods))} ([sweep.md](sweep.md), "
        "[peers.md](peers.md)). The answers to other prompts of all workloads, decoded plainly "
        f"before the sweep, are the corpus of: {', '.join(with_corpus) or 'none of them'}.\n"
    )
    versions = environment.get("versions", {})
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    commit = environment.get("commit")
    lines = [f"- versions: {known}" if known else "", f"- commit: {commit}" if commit else ""]
    lines.append(f"- begun: {environment['started']}" if "started" in environment else "")
    lines += [
        f"- server `{name}`: `{' '.join(server['flags'])}`"
        for name, server in environment.get("servers", {}).items()
        if server.get("flags")
    ]
    yield "\n".join(line for line in lines if line) + "\n"
    yield f"```sh\n{_command(plan)}\nsglang-ext sweep report results --performance docs\n```\n"


def _size(summary: Summary, workload: str) -> str:
    """How many prompts were measured, and how long they and their outputs are."""
    row = next((row for row in summary.rows if row.point.workload == workload), None)
    count = row.median("completed") if row else None
    if row is None or not count:
        return ""
    read, written = (row.columns[f"total_{side}_tokens"].median for side in ("input", "output"))
    return (
        f" {count:.0f} prompts of {read / count:,.0f} tokens in the mean, "
        f"outputs of {written / count:,.0f}."
    )


def _command(plan: Plan) -> str:
    """The command of this plan; folders are the reader's own."""
    options = {
        "model": Path(plan.model).name,
        "methods": ",".join(plan.methods),
        "workloads": ",".join(plan.workloads),
        "batches": ",".join(map(str, plan.batches)),
        "rates": ",".join(f"{rate:g}" for rate in plan.rates),
        "repeats": str(plan.repeats),
        "most-repeats": str(plan.most_repeats or ""),
        "minutes": f"{plan.minutes:g}" if plan.minutes else "",
        "prompts": str(plan.prompts),
        "max-tokens": str(plan.max_tokens),
        "seed": str(plan.seed),
    }
    parts = [f"--{name} {shlex.quote(v)}" for name, v in options.items() if v or name == "batches"]
    if plan.server_flags:
        parts.append(f"--server-flags={shlex.quote(shlex.join(plan.server_flags))}")
    return " \\\n    ".join(["sglang-ext sweep --out results", *parts])


def _picture(plot: Plot) -> str:
    return f"![{plot.caption}]({PICTURES}/{plot.name}.svg)\n\n*{plot.caption}*\n"


def _first_paragraph(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
