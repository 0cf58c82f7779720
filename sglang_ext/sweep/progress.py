"""How long a sweep still takes."""

import statistics
from collections.abc import Iterable

from sglang_ext.sweep.plan import Point


class Pace:
    """How long runs take, and so how long is left.

    Attributes:
        start_s: seconds that starting all servers takes.
    """

    def __init__(self) -> None:
        self.start_s = 0.0
        self._seconds: dict[tuple[str, str, float], list[float]] = {}
        self._noted = self._noted_in_wall = self._wall = 0.0

    def note(self, point: Point, seconds: float) -> None:
        """A run of this point took so long."""
        self._seconds.setdefault((point.workload, point.mode, point.load), []).append(seconds)
        self._noted += seconds

    def took(self, seconds: float) -> None:
        """The runs noted since the last call took so long with all that is between them."""
        self._wall += seconds
        self._noted_in_wall = self._noted

    def seconds(self, points: Iterable[Point]) -> float:
        """How long these will take; loads that were not met yet as the others."""
        means = {load: statistics.fmean(seconds) for load, seconds in self._seconds.items()}
        usual = statistics.fmean(means.values()) if means else 0.0
        between = self._wall / self._noted_in_wall if self._noted_in_wall else 1.0
        return between * sum(means.get((p.workload, p.mode, p.load), usual) for p in points)

    def left(self, points: Iterable[Point], starts: int = 0) -> str:
        """The same for people; the servers are started so many times more."""
        return f"{_duration(self.seconds(points) + starts * self.start_s)} left"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
