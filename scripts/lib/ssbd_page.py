"""What bench_ssbd has shown, as the page that people read: SSBD's Tables 2 to 4 and two plots."""

from pathlib import Path

from scripts.lib import ssbd_plots
from scripts.lib.result_page import Picture, ResultPage
from scripts.lib.ssbd_plots import Tables
from sglang_ext.sweep.plots import Plot, style
from sglang_ext.sweep.result_tables import Table

HEADER = ("mode", "chrF", "BLEU", "NE", "NE less", "A/D", "A/O", "tok/s", "speedup")
READING = """\
Sentences that grow by a few words are translated anew after each step. The columns of SSBD's
Tables 2 to 4:

- **NE**, normalized erasure: tokens taken back from the display by tokens of the final outputs;
  **NE less**: below AR's without mask.
- **A/D**, **A/O**: accepted draft tokens by draft tokens and by output tokens.
- **SSBD**: as published; **realigned**: drafts go on behind a disagreement; **SSBD+**: that, and
  drafts retrieved from prompt, output and datastore, as the server does by default.
- **mask k**: the last k tokens of each output but the last are not displayed; **trim k**: nor
  drafted; **whole words**: nor is the beginning of a word that the mask cuts.
- Exact (beta 0): the output is AR's; with a bias (beta above 0) it is not, which is what makes the
  display calmer."""


def table_of(table: ssbd_plots.Table) -> Table:
    """A table of ssbd_plots for a page."""
    rows = [
        (
            r.name, f"{r.chrf:.2f}", f"{r.bleu:.2f}", f"{r.ne:.3f}",
            f"{table.ne_reduction(r.name):.1%}",
            f"{r.ad:.1%}" if r.ad or r.ao else "-", f"{r.ao:.1%}" if r.ad or r.ao else "-",
            f"{r.tokens_per_s:.2f}", f"{table.speedup(r.name):.2f}x",
        )
        for r in table.rows
    ]  # fmt: skip
    return Table(f"{table.title} ({table.rows[0].streams} streams)", HEADER, rows)


def write_page(docs: Path, tables: Tables) -> None:
    """docs/measured/ssbd.md."""
    figures, settings = tables.figures(), tables.settings
    findings = [
        f"{settings.model}, {settings.source} ({settings.source_language} to "
        f"{settings.target_language}), lag {settings.lag}, batch 1, greedy.",
        f"SSBD+ at beta 0.2 by AR: {figures['speedup_beta02']:.2f}x the tokens/s, normalized "
        f"erasure {figures['ne_reduction_beta02']:.0%} lower, "
        f"chrF {figures['chrf_delta_beta02']:+.2f}.",
        f"By SSBD as published: {figures['speedup_realign_vs_published']:.2f}x.",
        f"Outputs at beta 0 compared with AR's: {figures['outputs_compared']:.0f}, of which "
        f"{figures['mismatches_beta0']:.0f} differ.",
    ]
    with style():
        pictures = [
            Picture(
                Plot("ssbd-beta", "Quality, flicker and speed against beta."), tables.draw_sweep()
            ),
            Picture(
                Plot("ssbd-mask", "mask-k: flicker and speed; less erasure is calmer."),
                tables.draw_masks(),
            ),
        ]
    shown = [table_of(table) for table in (tables.sweep, tables.masks, tables.all_streams)]
    title = "SSBD: quality, flicker and speed of live re-translation"
    ResultPage("ssbd", title, findings, READING, shown, pictures).write(docs)
