"""What bench_specdec has shown: tables for a terminal, plots against tau, and a page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.result_page import Picture, ResultPage, aligned
from scripts.lib.specdec_methods import AT, Method
from scripts.lib.specdec_results import GROWING, SETTINGS, Results, Row
from sglang_ext.sweep.plots import Plot, panels, save, style
from sglang_ext.sweep.result_tables import Table

HEADER = (
    "method", "Tok.", "Iter.", "BLEU", "chrF", "repeated", "relaxed", "tok/s", "speedup", "memory",
)  # fmt: skip
READING = """\
The columns of SpecDec's tables (arXiv 2203.16487):

- **Tok.**: tokens that a decode step commits, the bonus included; **Iter.**: decode steps of a
  request. What a prefill writes is not counted.
- **repeated**: words that equal the one before them; **relaxed**: output tokens that only the
  relaxed rule accepted.
- **tok/s**: output tokens by seconds of requests at batch 1; **speedup**: over AT's.
- **memory**: what the server holds that answered, all of its drafters included.
- (b, t): top-beta and tau of the relaxed rule. Rows without one are exact: their output is AT's.
- Re-translation: sentences grow by a few words and are translated anew after each step; SSBD drafts
  the last output, without a bias."""
SHOWN_MISMATCHES = 5


def print_results(results: Results) -> None:
    """All tables, what is absent, and where an exact output is not AT's."""
    for table in tables_of(results):
        print(f"\n{aligned(table)}")
    for line in results.absent:
        print(f"\nabsent: {line}")
    exact = results.exactness()
    print(
        f"\nexact methods: {exact.compared} outputs compared with AT's, {len(exact.mismatches)} "
        f"differ; AT contradicts itself between batch sizes on {exact.contradictions} sentences"
    )
    for line in exact.mismatches[:SHOWN_MISMATCHES]:
        print(f"    differs: {line}")


def tables_of(results: Results) -> Iterator[Table]:
    """By suite and language, then speed by batch size."""
    for suite in results.methods:
        for language in results.languages():
            rows = results.rows(suite, language)
            if rows:
                title = f"{language}, {suite}, batch 1 ({rows[0].sentences} sentences)"
                yield Table(title, HEADER, [_cells(row, rows[0]) for row in rows])
    yield from _rates(results)


def _cells(row: Row, plain: Row) -> tuple[str, ...]:
    memory = "-" if row.memory is None else f"{row.memory / 2**30:.2f} GiB"
    return (
        row.name, f"{row.per_step:.2f}", f"{row.iterations:.2f}", f"{row.bleu:.2f}",
        f"{row.chrf:.2f}", f"{row.repetition:.2%}", f"{row.relaxed:.1%}",
        f"{row.tokens_per_s:.2f}", f"{row.tokens_per_s / plain.tokens_per_s:.2f}x", memory,
    )  # fmt: skip


def _rates(results: Results) -> Iterator[Table]:
    batches = sorted({rate.batch for rate in results.rates})
    for language in results.languages() if batches else ():
        found = {
            (rate.method, rate.batch): rate.tokens / rate.seconds
            for rate in results.rates
            if rate.language == language
        }
        names = dict.fromkeys(name for name, _ in found)
        rows = []
        for name in names:
            speeds = [(found[name, b], found[AT.name, b]) for b in batches]
            rows.append((name, *(f"{own:.1f} ({own / at:.2f}x)" for own, at in speeds)))
        header = ("method", *(f"batch {batch}" for batch in batches))
        yield Table(f"{language}: tok/s (and by AT's) of sentences in flight", header, rows)


def write_page(docs: Path, results: Results, served: str, length: int) -> None:
    """docs/measured/specdec.md.

    Args:
        served: the model, as the page names it.
        length: most nodes drafted a step.
    """
    figures = results.figures(length)
    findings = [
        f"{served}, multi30k test_2016_flickr, greedy, {length} nodes drafted a step.",
        f"Outputs of exact methods compared with AT's: {figures['outputs_compared']:.0f}, of which "
        f"{figures['mismatches']:.0f} differ.",
        *(f"Absent: {line}" for line in results.absent),
    ]
    with style():
        pictures = [Picture(plot, figure) for plot, figure in draw(results)]
    title = "SpecDec and relaxed acceptance: tokens, quality and speed"
    shown = list(tables_of(results))
    ResultPage("specdec", title, findings, READING, shown, pictures).write(docs)


def write_plots(folder: Path, results: Results) -> None:
    """The pictures of the page, in a folder that is made if it is not there."""
    with style():
        for plot, figure in draw(results):
            save(figure, folder, plot.name)
            print(f"plot: {folder / plot.name}.png, and the same as SVG")


def draw(results: Results) -> Iterator[tuple[Plot, Any]]:
    """Accepted tokens and BLEU against tau, a picture for each drafter with relaxed rows."""
    drafters = ((SETTINGS, "SSSD"), (GROWING, "SSBD"), (SETTINGS, "SpecDec++"))
    for suite, drafter in drafters:
        begins = drafter if drafter.endswith("++") else f"{drafter} relaxed"
        relaxed = [
            m
            for m in results.methods.get(suite, ())
            if m.rule is not None and m.rule.by == "target" and m.name.startswith(begins)
        ]
        if relaxed:
            name = f"specdec-tau-{drafter.lower().replace('+', 'p')}"
            caption = f"{drafter}: tokens a decode step commits, and BLEU, against tau."
            yield Plot(name, caption), _against_tau(results, suite, relaxed)


def _against_tau(results: Results, suite: str, methods: Sequence[Method]) -> Any:
    languages = results.languages()
    figure, axes = panels(len(languages), 2)
    for line, language in zip(axes, languages, strict=True):
        plain = results.row(suite, language, AT.name)
        for top_beta in sorted({m.rule.top_beta for m in methods if m.rule is not None}):
            own = sorted(
                (m.rule.tau, row)
                for m in methods
                if m.rule is not None and m.rule.top_beta == top_beta
                if (row := results.row(suite, language, m.name)) is not None
            )
            taus = [tau for tau, _ in own]
            label = f"top-beta {top_beta}"
            line[0].plot(taus, [row.per_step for _, row in own], marker="o", label=label)
            line[1].plot(taus, [row.bleu for _, row in own], marker="o", label=label)
        if plain is not None:
            line[1].axhline(plain.bleu, color="0.45", linestyle="--", label="AT")
        line[0].set(xlabel="tau", ylabel="tokens a step", title=language)
        line[1].set(xlabel="tau", ylabel="BLEU", title=language)
        line[1].legend()
    return figure
