"""What repeats say of a sweep: how far another one will agree, and how far off a ratio may be."""

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as students_t

_CONFIDENCE = 0.95
# Standard deviation of a median of three values or more by that of their mean, at most.
_MEDIAN_BY_MEAN = math.sqrt(math.pi / 2.0)


def agreement_limit(speedups: Sequence[Sequence[float]]) -> float | None:
    """By how many percent any point's speedup differs between two such sweeps, at most.

    With 95% probability for all points together (Bonferroni): ISO 5725's repeatability limit,
    t sqrt(2 / n) s, of medians over n repeats. s is the standard deviation of a speedup's logarithm
    from repeat to repeat, pooled over the points; n the fewest repeats of a point.

    Args:
        speedups: of each point, repeat by repeat.

    Returns:
        None where no point was repeated.
    """
    found = _standard_error(speedups)
    if found is None:
        return None
    error, degrees = found
    return _reach(math.sqrt(2.0) * error, degrees, sum(map(bool, speedups)))


def ratio_error(ratios: Sequence[Sequence[float]]) -> float | None:
    """By how many percent one point's median ratio is off, at most, with 95% probability.

    Args:
        ratios: of each point, repeat by repeat; the repeats' scatter is pooled over all points.

    Returns:
        None where no point was repeated: nothing is known of it then.
    """
    found = _standard_error(ratios)
    return None if found is None else _reach(*found, points=1)


def _standard_error(ratios: Sequence[Sequence[float]]) -> tuple[float, int] | None:
    """(standard error of the logarithm of a point's median ratio, degrees of freedom)."""
    logs = [[math.log(ratio) for ratio in repeats] for repeats in ratios if repeats]
    degrees = sum(len(values) - 1 for values in logs)
    if not degrees:
        return None
    squares = sum((len(values) - 1) * statistics.variance(values) for values in logs if values[1:])
    fewest = min(map(len, logs))
    error = math.sqrt(squares / degrees / fewest) * (_MEDIAN_BY_MEAN if fewest > 2 else 1.0)
    return error, degrees


def _reach(error: float, degrees: int, points: int) -> float:
    """How far off `points` values of this standard error are, all within it, in percent."""
    times = float(students_t.ppf(1.0 - (1.0 - _CONFIDENCE) / 2.0 / points, degrees))
    return 100.0 * math.expm1(times * error)
