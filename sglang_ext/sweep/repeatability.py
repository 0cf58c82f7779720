"""How far another sweep of the same plan will agree with one."""

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
    logs = [[math.log(ratio) for ratio in ratios] for ratios in speedups if ratios]
    degrees = sum(len(values) - 1 for values in logs)
    if not degrees:
        return None
    squares = sum((len(values) - 1) * statistics.variance(values) for values in logs if values[1:])
    fewest = min(map(len, logs))
    error = math.sqrt(2.0 * squares / degrees / fewest) * (_MEDIAN_BY_MEAN if fewest > 2 else 1.0)
    reach = float(students_t.ppf(1.0 - (1.0 - _CONFIDENCE) / 2.0 / len(logs), degrees))
    return 100.0 * math.expm1(reach * error)
