"""Decode steps of a row of bench_mirror: how long they take, and what of it is whose."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scripts.lib.mirror_runs import Answer


@dataclass(frozen=True)
class Steps:
    """A row's decode steps by themselves, batch 1: totals over its answers.

    Attributes:
        tokens: that were committed behind the first of each answer.
        seconds: in which.
        counts: growth of mirror_runs.COUNTED.
    """

    tokens: int
    seconds: float
    counts: Mapping[str, float]

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> "Steps":
        """Those of some answers."""
        answers = list(answers)
        names = answers[0].counts
        counts = {name: sum(a.counts[name] for a in answers) for name in names}
        tokens = sum(len(a.token_ids) - 1 for a in answers)
        return cls(tokens, sum(a.decode_seconds for a in answers), counts)

    @property
    def steps(self) -> float:
        """Passes of the target, those that verified nothing included."""
        return self.counts["plain_steps_total"] + self.counts["verify_steps_total"]

    @property
    def accept_length(self) -> float:
        """Tokens that a step commits."""
        return self.tokens / self.steps

    @property
    def step_ms(self) -> float:
        """Wall time of a step."""
        return 1e3 * self.seconds / self.steps

    @property
    def nodes(self) -> float:
        """Drafted nodes that a step verifies."""
        return self.counts["spec_decode_num_draft_tokens_total"] / self.steps

    def part_ms(self, *series: str) -> float:
        """What the seconds of these series make of a step."""
        return 1e3 * sum(self.counts[name] for name in series) / self.steps

    @property
    def pass_ms(self) -> float:
        """T_target: the passes, their exits included."""
        return self.part_ms("plain_seconds_total", "verify_seconds_total")

    @property
    def suffix_ms(self) -> float:
        """T_target(l_e+1..N): what of a pass comes behind its exit."""
        return self.pass_ms - self.part_ms("before_exit_seconds_total", "early_exit_seconds_total")

    @property
    def waited_ms(self) -> float:
        """What drafting keeps a step waiting."""
        return self.part_ms("draft_seconds_total")

    @property
    def law_ms(self) -> float | None:
        """A step by Eq. 10, from its parts as measured in these steps; None: no exit was seen.

        T_target(1..l_e) + T_rv(ee) + max(T_target(l_e+1..N), T_draft) + T_rv(fv): the pass, its
        exit included, and what drafting kept it waiting, which is T_rv(fv) and the part of T_draft
        that the suffix did not hide.
        """
        return self.pass_ms + self.waited_ms if self.counts["early_exit_steps_total"] else None

    def foretold_ms(self, draft_ms: float) -> float | None:
        """A step by Eq. 10, from what drafting takes where it is not hidden; None as in `law_ms`.

        A draft that was not there (appendix E's fallback) adds all of `draft_ms` to the pass.

        Args:
            draft_ms: T_draft, as ordinary speculative decoding waits for it in a step.
        """
        missed = self.fallback_share
        if self.law_ms is None or missed is None:
            return None
        suffix = self.suffix_ms
        hit, fallback = max(suffix, draft_ms), suffix + draft_ms
        return self.pass_ms - suffix + (1 - missed) * hit + missed * fallback

    @property
    def hidden_share(self) -> float | None:
        """Of the draft model's seconds those that no step waited; None: it did not draft."""
        drafted = self.counts["drafter.draft_seconds"] - self.counts["drafter.reading_seconds"]
        if drafted <= 0:
            return None
        return max(0.0, 1.0 - self.counts["drafter.waited_seconds"] / drafted)

    @property
    def fallback_share(self) -> float | None:
        """Of the drafts that were asked for, those that were not there; None: none was."""
        return _share(self.counts["drafter.fallbacks"], self.counts["drafter.hits"])

    def unforeseen(self, top: int) -> float | None:
        """Of the outcomes of passes with an exit, those not among its first `top` candidates."""
        outcomes = self.counts["drafter.outcomes"]
        return 1.0 - self.counts[f"drafter.foreseen_top{top}"] / outcomes if outcomes else None

    def passes_a_window(self, window: int) -> float | None:
        """Passes of the draft model for a window that a step waits for; None: none did."""
        tokens = self.counts["drafter.asked_tokens"]
        return window * self.counts["drafter.asked_steps"] / tokens if tokens else None


def _share(part: float, rest: float) -> float | None:
    return part / (part + rest) if part + rest else None
