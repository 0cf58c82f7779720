"""What pays: how many rows a draft pass reads, and how long a step waits for a draft."""

from collections.abc import Callable, Sequence

import numpy as np

_FADE = 0.1
# Of a pass of one row: what a row may take beside others to be read before it pays, and how long
# a pass may get by such rows.
_RIDING, _LONGEST = 1 / 6, 2.5
# A pass that nobody waits for takes so much of its time from the target, with which it shares
# memory bandwidth and clock rate (measured on two cores of a Zen 5: 0.08).
_TAKEN = 0.06
# Row counts between these are interpolated.
ROWS = (1, 2, 4, 8, 16, 32, 64)


class RowCosts:
    """Seconds that a draft pass takes by its rows: measured first, then learned from each pass.

    Args:
        seconds: of a pass of so many rows.
    """

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = np.maximum.accumulate([seconds(rows) for rows in ROWS])
        self._tables = self._table()

    def __call__(self, rows: int) -> float:
        """Seconds of a pass of `rows` rows."""
        if rows < len(self._tables):
            return self._tables[rows]
        return self._tables[-1] * rows / (len(self._tables) - 1)

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of `rows` rows took `seconds`."""
        factor = 1.0 + _FADE * (min(max(seconds / self(rows), 0.2), 5.0) - 1.0)
        # Near counts move with it, far ones less.
        near = np.exp(-np.abs(np.log2(np.array(ROWS) / rows)))
        self._seconds = np.maximum.accumulate(self._seconds * factor**near)
        self._tables = self._table()

    def _table(self) -> list[float]:
        whole = np.interp(np.arange(ROWS[-1] + 1), ROWS, self._seconds)
        return [float(seconds) for seconds in whole]


def rows_that_pay(probs: Sequence[float], cost: Callable[[int], float], most_s: float) -> int:
    """How many of the likeliest nodes a pass reads: as many as give most belief per second.

    Args:
        probs: beliefs in the nodes, the highest first.
        cost: seconds of a pass by its rows.
        most_s: seconds that it may take.

    Returns:
        0 where not even one row is done in time.
    """
    best, best_rate, total = 0, 0.0, 0.0
    for rows, prob in enumerate(probs, 1):
        total += prob
        seconds = cost(rows)
        if seconds > most_s:
            break
        if total / seconds > best_rate:
            best, best_rate = rows, total / seconds
    return best


def rows_to_read_ahead(probs: Sequence[float], cost: Callable[[int], float], most_s: float) -> int:
    """How many of the likeliest nodes a pass reads that nobody waits for.

    Those that pay, and others as long as one takes little beside a pass of its own, which it would
    take later: whatever a pass reads, it reads the weights once, and the target waits for memory.
    None where a pass takes more from the target than the waits that it is likely to save: of a node
    that the text goes through, a pass of one row.

    Args, returns: as `rows_that_pay`.
    """
    rows = rows_that_pay(probs, cost, most_s)
    alone = cost(1)
    if sum(probs[:rows]) * alone < _TAKEN * cost(rows):
        return 0
    longest = min(most_s, _LONGEST * alone)
    while 0 < rows < len(probs) and cost(rows + 1) <= min(longest, cost(rows) + _RIDING * alone):
        rows += 1
    return rows


def tokens_of(alpha: float, length: int) -> float:
    """Tokens that a step commits of a chain of `length`, the bonus included, in the mean.

    Args:
        alpha: how likely a drafted token is right once those before it are; below 1.
    """
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


def length_that_pays(
    alpha: float, token_s: float, step_s: float, ready: Sequence[int], most: int
) -> tuple[int, float]:
    """How long the chains of a batch should be, so that it commits most tokens a second.

    Args:
        alpha: as in `tokens_of`.
        token_s: seconds of waiting for another token of every chain.
        step_s: seconds that the target's pass takes.
        ready: tokens that are drafted already, by request; they cost no wait.
        most: longest chain.

    Returns:
        the length, 0 where no wait pays; and the seconds beyond which waiting for it is a loss.
    """
    plain = sum(tokens_of(alpha, n) for n in ready)
    best, best_rate, most_s = 0, plain / step_s, 0.0
    for length in range(min(ready) + 1, most + 1):
        tokens = sum(tokens_of(alpha, max(n, length)) for n in ready)
        rate = tokens / (step_s + token_s * (length - min(ready)))
        if rate > best_rate:
            best, best_rate, most_s = length, rate, step_s * (tokens / plain - 1.0)
    return best, most_s


def another_pays(
    chains: Sequence[Sequence[float]],
    waiting: Sequence[Sequence[float]],
    alpha: float,
    token_s: float,
    so_far_s: float,
) -> bool:
    """Whether a batch commits more tokens a second if it waits for another token of some chains.

    It does where that token adds more a second than the step has without it.

    Args:
        chains: the probabilities of reaching each drafted token, of all requests.
        waiting: those of the chains that would get another token.
        alpha: how likely that one is right once the chain is.
        token_s: seconds until they have it.
        so_far_s: seconds of the step without it, those that were waited included.
    """
    committed = sum(1.0 + sum(chain) for chain in chains)
    gained = sum(alpha * (chain[-1] if chain else 1.0) for chain in waiting)
    return gained * so_far_s > committed * token_s


def kappa_for(batch: int, most: int) -> int:
    """Candidates behind each node that are followed in a batch of this size (appendix D.1).

    Args:
        most: those that there are.
    """
    for least, kappa in ((64, 1), (32, 2), (16, 4)):
        if batch >= least:
            return min(kappa, most)
    return most


def streams_for(batch: int, most: int) -> int:
    """Lookahead streams behind a row in a batch of this size (appendix D.1).

    Args:
        most: those that the draft model has.
    """
    return min(most, 1) if batch >= 16 else most
