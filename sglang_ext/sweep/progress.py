"""How long a sweep still takes."""

import statistics
from collections.abc import Iterable

from sglang_ext.sweep.plan import RATE, Point

# By which power of its load a run is quicker where nothing better is known: arrivals set the pace
# of a rate; a batch of twice the size does not give twice the tokens.
_RATE_POWER, _BATCH_POWER = 1.0, 0.7


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
        """How long these will take; a load that was not met yet as the others, by its size."""
        between = self._wall / self._noted_in_wall if self._noted_in_wall else 1.0
        return between * sum(map(self._expected, points))

    def _expected(self, point: Point) -> float:
        """Seconds of a run, without what is between runs; 0 before the first one."""
        if met := self._seconds.get((point.workload, point.mode, point.load)):
            return statistics.fmean(met)
        power = _RATE_POWER if point.mode == RATE else _BATCH_POWER
        others = [
            statistics.fmean(seconds) * ((load / point.load) ** power if mode == point.mode else 1)
            for (_, mode, load), seconds in self._seconds.items()
        ]
        return statistics.fmean(others) if others else 0.0

    def left(self, points: Iterable[Point], starts: int = 0) -> str:
        """Time left in words, with `starts` further starts of servers."""
        return f"{_duration(self.seconds(points) + starts * self.start_s)} left"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
