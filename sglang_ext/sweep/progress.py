"""How long a sweep still takes."""

import statistics
from collections.abc import Iterable

from sglang_ext.sweep.plan import Point


class Pace:
    """How long runs take, and so how long is left."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str, float], list[float]] = {}

    def note(self, point: Point, seconds: float) -> None:
        """A run of this point took so long."""
        self._seconds.setdefault((point.workload, point.mode, point.load), []).append(seconds)

    def left(self, points: Iterable[Point]) -> str:
        """How long these will take, for people; loads that were not met yet as the others."""
        means = {load: statistics.fmean(seconds) for load, seconds in self._seconds.items()}
        usual = statistics.fmean(means.values()) if means else 0.0
        seconds = sum(means.get((p.workload, p.mode, p.load), usual) for p in points)
        return f"{_duration(seconds)} left"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
