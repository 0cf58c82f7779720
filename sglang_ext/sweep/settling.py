"""Which runs a sweep makes: the plan's, and again what leaves open whether SSSD is faster."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from scipy.stats import t as students_t

from sglang_ext.sweep.methods import BASELINE, METHODS, OURS, PEER_WORKLOADS
from sglang_ext.sweep.plan import BATCH, Plan, Point
from sglang_ext.sweep.results import PointResult

# Of the interval in which a mean ratio lies.
_CONFIDENCE = 0.95

# Output tokens/s by repeat.
Speeds = Mapping[int, float]


def runs_needed(plan: Plan, results: Sequence[PointResult]) -> dict[tuple[int, Point], None]:
    """What a sweep must have to be finished: all, or with a limit of time the first repeat."""
    if plan.minutes:
        return {(repeat, point): None for repeat, point in plan.order() if repeat == 0}
    return dict.fromkeys((*plan.order(), *open_runs(plan, results)))


def open_runs(plan: Plan, results: Sequence[PointResult]) -> list[tuple[int, Point]]:
    """(repeat, point) of another repeat of SSSD live and of what it cannot be told apart from.

    At each batch size these are plain decoding and the best n-gram peer, if the interval in which
    the mean of their ratios lies with 95% confidence (Student's t, over the repeats, of the
    ratios' logarithms) holds 1. Which of the two is ahead makes no difference. None once
    `plan.most_repeats` were made.
    """
    speeds: dict[Point, dict[int, float]] = {}
    for result in results:
        if result.error is None and result.output_throughput:
            speeds.setdefault(result.point, {})[result.repeat] = result.output_throughput
    found = []
    for point in (p for p in speeds if p.method == OURS and p.mode == BATCH):
        repeat = max(speeds[point]) + 1
        if repeat < plan.most_repeats and (rivals := _rivals(plan, point, speeds)):
            again = [name for name in plan.methods if name in (OURS, *rivals)]
            found += [(repeat, dataclasses.replace(point, method=name)) for name in again]
    return found


def _rivals(plan: Plan, ours: Point, speeds: Mapping[Point, Speeds]) -> list[str]:
    peers = [name for name in plan.methods if name in METHODS and METHODS[name].peer]
    measured = {
        name: ratios
        for name in (BASELINE, *(peers if ours.workload in PEER_WORKLOADS else ()))
        if (ratios := _log_ratios(speeds, ours, name))
    }
    best = min(
        (name for name in measured if name != BASELINE),
        key=lambda name: statistics.median(measured[name]),
        default="",
    )
    return [name for name in (BASELINE, best) if name in measured and _is_open(measured[name])]


def _log_ratios(speeds: Mapping[Point, Speeds], ours: Point, rival: str) -> list[float]:
    own, other = speeds[ours], speeds.get(dataclasses.replace(ours, method=rival), {})
    return [math.log(own[repeat] / other[repeat]) for repeat in own.keys() & other.keys()]


def _is_open(log_ratios: Sequence[float]) -> bool:
    count = len(log_ratios)
    if count < 2:
        return True
    error = statistics.stdev(log_ratios) / math.sqrt(count)
    reach = float(students_t.ppf((1.0 + _CONFIDENCE) / 2.0, count - 1)) * error
    return abs(statistics.fmean(log_ratios)) <= reach
