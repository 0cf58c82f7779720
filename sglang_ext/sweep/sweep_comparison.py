"""How far two sweeps of the same plan agree."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sglang_ext.sweep.methods import BASELINE
from sglang_ext.sweep.plan import BATCH
from sglang_ext.sweep.summary import Row, Summary


def compare(first: Summary, second: Summary) -> dict[str, float]:
    """How far two sweeps agree: their medians of speedup, point by point.

    Not of output_throughput: a machine may be faster an hour later, for all methods alike.

    Returns:
        points: with a speedup in both, in mode "batch"; median_difference_percent and
        worst_difference_percent of these; within_spread_percent: how many of them differ by no
        more than stated_spread_percent, the larger speedup_agreement_percent of the two, which is
        left out, both are, where neither has repeated anything; throughput_difference_percent:
        that of output_throughput in the median.
    """
    rows = [
        (row, other)
        for row in first.rows
        if row.point.mode == BATCH and (other := second.row(row.point)) is not None
    ]
    differences = _differences([r for r in rows if r[0].point.method != BASELINE], "speedup")
    if not len(differences):
        return {"points": 0}
    found = {
        "points": len(differences),
        "median_difference_percent": float(np.median(differences)),
        "worst_difference_percent": float(differences.max()),
        "throughput_difference_percent": float(np.median(_differences(rows, "output_throughput"))),
    }
    stated = [
        limit
        for limit in (s.figures().get("speedup_agreement_percent") for s in (first, second))
        if limit is not None
    ]
    if stated:
        found["stated_spread_percent"] = max(stated)
        found["within_spread_percent"] = float(100.0 * (differences <= max(stated)).mean())
    return found


def _differences(rows: Iterable[tuple[Row, Row]], column: str) -> npt.NDArray[np.float64]:
    """By how many percent two rows' medians differ, where both have one above 0."""
    pairs = [(a, b) for x, y in rows if (a := x.median(column)) and (b := y.median(column))]
    return np.array([200.0 * abs(a - b) / (a + b) for a, b in pairs])
