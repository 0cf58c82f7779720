"""What issue 29 asks of bench_mirror's figures, and which of them keep to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """A bound on a figure.

    Attributes:
        figure: its name.
        least, most: bounds; None: none on that side.
        whole: it is about a whole run, and is not asked of a quick one.
    """

    figure: str
    least: float | None = None
    most: float | None = None
    whole: bool = False

    def broken_by(self, value: float) -> str:
        """How a value breaks it, in a line; empty: it does not."""
        if self.least is not None and not value >= self.least:
            return f"{self.figure} is {value:.4g}, at least {self.least:g} is asked"
        if self.most is not None and not value <= self.most:
            return f"{self.figure} is {value:.4g}, at most {self.most:g} is asked"
        return ""


LIMITS = (
    Limit("outputs_compared", least=1),
    Limit("mismatches", most=0),
    Limit("prompts_compared", least=100, whole=True),
    Limit("distribution_rejected", most=0),
    Limit("distribution_drafted", least=1),
    Limit("speedup_mirror_vs_ar", least=2.5),
    Limit("speedup_mirror_vs_vanilla", least=1.25),
    Limit("speedup_mirror_vs_vanilla_both", least=1.0),
    Limit("hidden_share", least=0.9),
    Limit("latency_law_error", most=0.05),
    Limit("fallback_rises", most=0),
    Limit("draft_steps_ratio_streaming", most=0.67),
    Limit("draft_steps_ratio_retrieval", most=0.8),
    Limit("mirrored_retrieval_critical_ratio", most=0.3),
    Limit("different_trees", most=0),
    Limit("executor_kills", least=20, whole=True),
    Limit("wrong_after_kills", most=0),
    Limit("hangs_after_kills", most=0),
)


def broken(figures: Mapping[str, float], whole: bool) -> Iterator[str]:
    """A line for each limit that a figure breaks.

    Args:
        whole: all parts have run, and not quickly.
    """
    for limit in LIMITS:
        if limit.figure in figures and (whole or not limit.whole):
            line = limit.broken_by(figures[limit.figure])
            if line:
                yield line


def unmeasured(figures: Mapping[str, float]) -> list[str]:
    """Figures that a limit is on and that are not there."""
    return [limit.figure for limit in LIMITS if limit.figure not in figures]
