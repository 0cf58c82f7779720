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
        means = {load: statistics.fmean(seconds) for load, seconds in self._seconds.items()}
        between = self._wall / self._noted_in_wall if self._noted_in_wall else 1.0

        def expected(mode: str, load: float) -> float:
            power = _RATE_POWER if mode == RATE else _BATCH_POWER
            return statistics.fmean(
                seconds * ((known / load) ** power if known_mode == mode else 1.0)
                for (_, known_mode, known), seconds in means.items()
            )

        return between * sum(
            means[key] if (key := (p.workload, p.mode, p.load)) in means
            else expected(p.mode, p.load) if means
            else 0.0
            for p in points
        )  # fmt: skip

    def left(self, points: Iterable[Point], starts: int = 0) -> str:
        """The same for people; the servers are started so many times more."""
        return f"{_duration(self.seconds(points) + starts * self.start_s)} left"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
