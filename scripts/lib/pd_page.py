"""What check_pd has shown, as the page that people read."""

from collections.abc import Mapping
from pathlib import Path

from scripts.lib.result_page import ResultPage
from sglang_ext.sweep.result_tables import Table

WAYS = {"single": "a single server", "pd": "prefill and decode apart"}
READING = """\
`sglang-ext pd` starts a prefill server, decode servers and a router; everything here ran on one
machine, where prefill and decode share the cores, and KV went over TCP: what is compared is
drafting in this set-up with drafting on a single server, never the set-up itself.

- **decode tokens/s**: from a request's first token to its last, one request at a time, prompt by
  prompt by turns. Both set-ups have served these answers before, and SSSD drafts from them: this is
  the speed of text that repeats. **speedup**: SSSD's by plain decoding's, in the same set-up.
- **drafter ready**: what a decode server takes to make a request's draft state when the request
  arrives; **lead**: how long before its KV that was.
- **shared datastore**: two decode servers on one folder; what one has served, the other drafts
  from."""


def write_page(docs: Path, figures: Mapping[str, float], model: str) -> None:
    """docs/measured/disaggregation.md, of all parts that ran."""
    tables = [
        table
        for table in (
            speeds(figures),
            listed("Drafting on decode servers", DRAFTING, figures, digits=2),
            listed("Kills", KILLS, figures, digits=0),
        )
        if table is not None and table.rows
    ]
    findings = [f"Model: {model}, greedy, on CPUs."]
    if "mismatches" in figures:
        findings.append(
            f"{figures['prompts']:.0f} prompts in four ways each: {figures['mismatches']:.0f} "
            "answers are not a single plain server's, token by token."
        )
    if "whisper_equal" in figures:
        findings.append(
            f"Whisper: {figures['whisper_equal']:.0f} of 2 transcripts are a single server's."
        )
    title = "Disaggregation: drafting where prefill and decode are apart"
    ResultPage("disaggregation", title, findings, READING, tables).write(docs)


def speeds(figures: Mapping[str, float]) -> Table | None:
    """Decode speeds, or nothing where they were not measured."""
    if "ratio_sssd_vs_ar_pd" not in figures:
        return None
    rows = [
        (
            label,
            f"{figures[f'decode_tokens_per_s_ar_{way}']:.1f}",
            f"{figures[f'decode_tokens_per_s_sssd_{way}']:.1f}",
            f"{figures[f'ratio_sssd_vs_ar_{way}']:.2f}x",
        )
        for way, label in WAYS.items()
    ]
    return Table("Decode tokens/s", ("", "plain", "SSSD", "speedup"), rows)


DRAFTING = {
    "draft_state_ms": "drafter ready after, ms",
    "draft_lead_ms": "lead before the KV, ms",
    "shared_seconds": "shared datastore: known to the other server after, s (at most)",
    "shared_cold_accept_length": "accept length of an answer that is new",
    "shared_accept_length": "accept length of one that the other server has given before",
}
KILLS = {
    "kills": "processes killed (kill -9), each in turn, under load",
    "requests": "requests",
    "errors": "of these, ended with an error that the client sees",
    "wrong": "of these, answered wrongly",
    "hangs": "of these, never answered",
}


def listed(
    title: str, labels: Mapping[str, str], figures: Mapping[str, float], digits: int
) -> Table:
    """The figures that there are, a row each.

    Args:
        labels: of figures by name, in order.
        digits: behind the point.
    """
    rows = [
        (label, f"{figures[name]:.{digits}f}") for name, label in labels.items() if name in figures
    ]
    return Table(title, ("", "measured"), rows)
