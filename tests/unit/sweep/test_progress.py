"""Time left."""

import pytest

from sglang_ext.sweep.plan import Point
from sglang_ext.sweep.progress import Pace


def test_time_left_is_that_of_runs_at_the_same_load():
    slow, fast = Point("a", "w", "batch", 1), Point("a", "w", "batch", 16)
    pace = Pace()
    assert pace.left([slow]) == "0 s left"
    pace.note(slow, 60.0)
    pace.note(slow, 120.0)
    pace.note(fast, 6.0)
    assert pace.left([]) == "0 s left"
    assert pace.left([Point("b", "w", "batch", 16)]) == "6 s left"
    assert pace.left([slow, slow]) == "3 min left"
    assert pace.left([slow] * 50) == "1 h 15 min left"
    # One that was not met yet counts as the mean of the others, each scaled to its size.
    unknown = (90.0 + 6.0 * 16**0.7) / 2
    assert pace.seconds([Point("a", "v", "batch", 1)]) == pytest.approx(unknown)
    assert pace.seconds([Point("a", "v", "batch", 2)]) == pytest.approx(unknown / 2**0.7)
    assert pace.seconds([Point("a", "v", "rate", 3)]) == pytest.approx((90.0 + 6.0) / 2)
    pace.note(Point("a", "w", "rate", 0.5), 200.0)
    slower = pace.seconds([Point("a", "w", "rate", 0.25)])
    assert slower == pytest.approx((90.0 + 6.0 + 400.0) / 3)


def test_what_is_between_runs_and_starts_of_servers_count():
    point = Point("a", "w", "batch", 1)
    pace = Pace()
    pace.note(point, 30.0)
    pace.took(60.0)
    assert pace.seconds([point, point]) == 120.0
    pace.note(point, 30.0)  # under way: not yet known with what is around it
    assert pace.seconds([point]) == 60.0
    pace.start_s = 90.0
    assert pace.left([point], starts=2) == "4 min left"
