"""What bench_specasr has shown, as the table and the page that people read."""

from collections.abc import Mapping
from pathlib import Path

from scripts.lib.result_page import Picture, ResultPage
from scripts.lib.specasr_runs import ENCODER_SECONDS, Row, best_baseline, counted_late, per_10s
from scripts.lib.speech_client import AUTOREGRESSIVE
from sglang_ext.sweep.plots import Plot, panels, style
from sglang_ext.sweep.result_tables import Table

HEADER = (
    "mode", "WER", "rounds", "draft steps", "predicted/round", "accepted/round",
    "decoding acceptance", "draft ms/10s", "target ms/10s", "decoder ms/10s", "vs AR",
    "vs best baseline", "prefill +ms/10s", "draft encoder ms/10s", "request ms/10s",
)  # fmt: skip
READING = """\
The columns of SpecASR's Table II, then of its Figs. 11 to 13.

- **rounds**: steps of the target after its prefill. **predicted**, **accepted**: drafted tokens on
  the main chain, and drafted tokens accepted; the bonus token is not counted.
- **decoding acceptance**: accepted by decoded tokens, in the draft model's own.
- **decoder**: drafting and the target's decode steps, with what its decoder takes longer in
  prefills than AR's (**prefill +**), where drafts are read along with the prompt.
- **draft encoder**: once a clip, beside the target's prefill; it is in no total, as the target's
  is not. **request**: all of it, encoders and HTTP too."""


def table(rows: Mapping[str, Row], wers: Mapping[str, float], seconds: float, target: str) -> Table:
    """The ablation: SpecASR's Table II, then its Figs. 11 to 13 as columns."""
    plain, baseline = rows[AUTOREGRESSIVE].decoder_seconds, best_baseline(rows)
    lines = []
    for name, row in rows.items():
        drafted = name != AUTOREGRESSIVE
        times = (
            row.draft_seconds, row.target_seconds, row.decoder_seconds, row.prefill_excess,
            row.total(ENCODER_SECONDS), row.request_seconds,
        )  # fmt: skip
        draft, verify, decoder, prefill, encoder, request = (
            f"{per_10s(time, seconds):.0f}" for time in times
        )
        lines.append((
            name, f"{wers[name]:.1%}", f"{row.rounds:.0f}",
            f"{row.total('drafter.draft_steps'):.0f}",
            f"{row.per_round(row.total('drafter.predicted_tokens')):.2f}",
            f"{row.per_round(row.accepted):.2f}",
            f"{row.decoding_acceptance:.1%}" if drafted else "-",
            draft, verify, decoder, f"{plain / row.decoder_seconds:.2f}",
            f"{baseline / row.decoder_seconds:.2f}", prefill, encoder, request,
        ))  # fmt: skip
    note = ""
    if counted_late(rows):
        note = "Decoding acceptance is not exact: the server counts a request's last round late."
    return Table(f"{target}; {seconds:.0f} s of audio, batch 1", HEADER, lines, note)


def draw(rows: Mapping[str, Row], seconds: float) -> Picture:
    """Where a decoder's time goes, mode by mode."""
    with style():
        figure, [[axis]] = panels(1, 1)
        figure.set_size_inches(7, 3.2)
        names = list(rows)[::-1]
        draft, target = (
            [per_10s(getattr(rows[name], part), seconds) for name in names]
            for part in ("draft_seconds", "target_seconds")
        )
        axis.barh(names, target, label="target")
        axis.barh(names, draft, left=target, label="draft")
        axis.set_xlabel("decoder, ms per 10 s of audio")
        axis.legend()
    caption = "Time of the decoders by mode: the target's steps, and drafting. Shorter is better."
    return Picture(Plot("specasr", caption), figure)


def write_page(
    docs: Path, rows: Mapping[str, Row], shown: Table, figures: Mapping[str, float]
) -> None:
    """docs/measured/specasr.md."""
    findings = [
        f"TSP by AR, decoders: {figures['speedup_tsp_vs_ar']:.2f}x; by the best plain speculation: "
        f"{figures['speedup_tsp_vs_best_baseline']:.2f}x; whole requests by AR's: "
        f"{figures['request_speedup_tsp_vs_ar']:.2f}x.",
        f"WER: target {figures['wer_target']:.1%}, SpecASR {figures['wer_specasr']:.1%}, draft "
        f"model alone {figures['wer_draft']:.1%}.",
        f"Transcripts whose tokens are not AR's: {figures['mismatches']:.0f}.",
    ]
    page = ResultPage(
        "specasr", "SpecASR: what is drafted, accepted, and what it costs", findings, READING,
        [shown], [draw(rows, figures["audio_seconds"])],
    )  # fmt: skip
    page.write(docs)
