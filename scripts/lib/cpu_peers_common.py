"""What the parts of scripts.bench_cpu_peers share: flags of servers, ratios with their error."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.options import Options
from sglang_ext.sweep.repeatability import ratio_error

WEIGHTS_FLAG = "--cpu-weights"
"""Of `sglang-ext serve`: the form that a CPU's weights have."""


class UsageError(Exception):
    """What is wrong with the command line, in a line."""


@dataclass(frozen=True)
class Taken:
    """What something took, or what was made of it.

    Attributes:
        seconds: of the clock.
        cpu_s: CPU seconds of all processes that took part.
        tokens: of the outputs; 0 where they do not count.
    """

    seconds: float
    cpu_s: float
    tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, prompts' time included."""
        return self.tokens / self.seconds


def weights_flags(weights: str, option: str) -> list[str]:
    """The flags of a server whose weights have this form; "": what it has by itself.

    Args:
        option: of the benchmark, for the message.

    Raises:
        UsageError: this server has no such flag.
    """
    if not weights:
        return []
    if "cpu_weights" not in {field.name for field in dataclasses.fields(Options)}:
        raise UsageError(f"{option} {weights}: `sglang-ext serve` here has no {WEIGHTS_FLAG}")
    return [WEIGHTS_FLAG, weights]


def ratio_figures(name: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """`name`, the ratio of the sums, and `name`_error_percent, how far off it may be at 95%.

    Args:
        ours, theirs: of the same pieces of work, measured in turns; both the less the better, or
            both the more the better.
    """
    figures = {name: sum(ours) / sum(theirs)}
    error = ratio_error([[a / b for a, b in zip(ours, theirs, strict=True)]])
    return figures | ({} if error is None else {f"{name}_error_percent": error})
