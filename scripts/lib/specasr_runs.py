"""Clips decoded in SpecASR's modes, from the server's own counters: rounds, acceptance, times."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from scripts.lib.speech_client import AUTOREGRESSIVE, BASELINES, TWO_PASS, Transcript

# Metrics that count up; their differences around a request are the request's.
SECONDS = (
    "draft_seconds_total", "verify_seconds_total", "plain_seconds_total", "known_seconds_total",
)  # fmt: skip
ENCODER_SECONDS = "draft_prefill_seconds_total"
PREFILL_SECONDS = "prefill_decoder_seconds_total"
STEPS = ("verify_steps_total", "plain_steps_total")
DRAFTER = ("draft_steps", "decoded_tokens", "predicted_tokens", "accepted_tokens")
COUNTED = (
    *SECONDS, ENCODER_SECONDS, PREFILL_SECONDS, *STEPS, "accept_length_sum", "accept_length_count",
    *(f"drafter.{name}" for name in DRAFTER),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One clip decoded once in one mode: its transcript, and what the metrics counted."""

    transcript: Transcript
    counted: Mapping[str, float]

    @property
    def decoder_seconds(self) -> float:
        return sum(self.counted[name] for name in SECONDS)


@dataclass
class Row:
    """A mode's results.

    Attributes:
        runs: for each clip, its repeats.
        prefill_excess: seconds that the target's decoder took longer in prefills than in AR's:
            TSP has drafts read there.
    """

    runs: list[list[Run]] = field(default_factory=list)
    prefill_excess: float = 0.0

    def prefills(self) -> list[float]:
        return [run.counted[PREFILL_SECONDS] for repeats in self.runs for run in repeats]

    def total(self, name: str) -> float:
        """A counted metric over all clips; of a clip's repeats, the one of median time counts."""
        return sum(run.counted[name] for run in self.typical())

    def typical(self) -> list[Run]:
        """Each clip's repeat with the median decoder time (the lower one of two)."""
        middles = []
        for repeats in self.runs:
            ranked = sorted(repeats, key=lambda run: run.decoder_seconds)
            middles.append(ranked[(len(ranked) - 1) // 2])
        return middles

    @property
    def rounds(self) -> float:
        """Steps of the target after the prefill, with drafts or without."""
        return sum(self.total(name) for name in STEPS)

    @property
    def accepted(self) -> float:
        """Drafted tokens that the target accepted (the bonus tokens are its own)."""
        return self.total("accept_length_sum") - self.total("accept_length_count")

    @property
    def draft_seconds(self) -> float:
        return self.total("draft_seconds_total")

    @property
    def target_seconds(self) -> float:
        steps = sum(self.total(name) for name in SECONDS) - self.draft_seconds
        return steps + self.prefill_excess

    @property
    def decoder_seconds(self) -> float:
        return self.draft_seconds + self.target_seconds

    @property
    def request_seconds(self) -> float:
        """From sending a request to its end, encoders and HTTP included."""
        return sum(run.transcript.seconds for run in self.typical())

    @property
    def decoding_acceptance(self) -> float:
        """Accepted tokens by tokens that the draft model decoded; 0 where it decoded none.

        Both are the draft model's tokens: the target may write the same text in more or fewer.
        """
        decoded = self.total("drafter.decoded_tokens")
        return self.total("drafter.accepted_tokens") / decoded if decoded else 0.0

    def per_round(self, tokens: float) -> float:
        return tokens / self.rounds if self.rounds else 0.0


def prefill_excess(row: Row, plain: Row) -> float:
    """Seconds that all clips' prefills take longer in one mode than in another."""
    pairs = zip(row.prefills(), plain.prefills(), strict=True)
    return len(row.runs) * statistics.median(own - other for own, other in pairs)


def mismatches(rows: Mapping[str, Row]) -> int:
    """Runs, of any mode, whose tokens are not those of AR's first run of the clip."""
    truth = [repeats[0].transcript.token_ids for repeats in rows[AUTOREGRESSIVE].runs]
    return sum(
        run.transcript.token_ids != expected
        for row in rows.values()
        for expected, repeats in zip(truth, row.runs, strict=True)
        for run in repeats
    )


def summarize(rows: Mapping[str, Row], seconds: float) -> dict[str, float]:
    """The figures; times are per 10 s of audio, of TSP where no mode is named."""
    plain = rows[AUTOREGRESSIVE].decoder_seconds
    tsp = rows[TWO_PASS]
    return {
        "speedup_asp_vs_ar": plain / rows["ASP"].decoder_seconds,
        "speedup_recycling_vs_ar": plain / rows["ASP+recycling"].decoder_seconds,
        "speedup_tsp_vs_ar": plain / tsp.decoder_seconds,
        "speedup_tsp_vs_best_baseline": best_baseline(rows) / tsp.decoder_seconds,
        "request_speedup_tsp_vs_ar": rows[AUTOREGRESSIVE].request_seconds / tsp.request_seconds,
        "decoding_acceptance_asp": rows["ASP+recycling"].decoding_acceptance,
        "accepted_per_round_tsp": tsp.per_round(tsp.accepted),
        "prefill_excess_ms_per_10s": per_10s(tsp.prefill_excess, seconds),
        "draft_ms_per_10s": per_10s(tsp.draft_seconds, seconds),
        "target_ms_per_10s": per_10s(tsp.target_seconds, seconds),
        "ar_ms_per_10s": per_10s(plain, seconds),
        "mismatches": mismatches(rows),
    }


def counted_late(rows: Mapping[str, Row]) -> bool:
    """Whether a request's last round is counted in the next request: AR accepts no drafts."""
    plain = (run for repeats in rows[AUTOREGRESSIVE].runs for run in repeats)
    return any(run.counted["drafter.accepted_tokens"] for run in plain)


def best_baseline(rows: Mapping[str, Row]) -> float:
    """Decoder seconds of the fastest plain speculation."""
    return min(rows[name].decoder_seconds for name in BASELINES)


def per_10s(decoder_seconds: float, audio_seconds: float) -> float:
    """Milliseconds per 10 s of audio."""
    return 1000 * decoder_seconds * 10 / audio_seconds
