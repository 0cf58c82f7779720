"""How often the early exit had the outcome of a pass among its candidates, by how many it names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOPS = (1, 2, 4, 8, 16)
"""Candidates behind each node: the widths kappa that are counted, as far as a view has them."""


@dataclass(frozen=True)
class Foreseen:
    """What the early exit said of one request's nodes in a pass.

    Attributes:
        tokens, parents: int32[n], the verified nodes, the root first; its parent is -1.
        candidates: int32[n, kappa], behind each node, best first.
    """

    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    candidates: npt.NDArray[np.int32]

    def rank(self, committed: Sequence[int]) -> int | None:
        """Where the outcome's last token stood among the candidates behind the accepted node.

        Args:
            committed: the accepted tokens and the one behind them, at least one.

        Returns:
            0 for the likeliest; None: it was not among them.
        """
        node = 0
        for token in committed[:-1]:
            below = np.flatnonzero((self.parents == node) & (self.tokens == token))
            if not len(below):
                return None
            node = int(below[0])
        places = np.flatnonzero(self.candidates[node] == committed[-1])
        return int(places[0]) if len(places) else None


class Foresight:
    """Counts of outcomes, and of those that were foreseen."""

    def __init__(self) -> None:
        self._outcomes = 0
        self._within = dict.fromkeys(TOPS, 0)

    def note(self, view: Foreseen, committed: Sequence[int]) -> None:
        """These tokens were committed of a pass of which the exit had said this."""
        rank = view.rank(committed)
        self._outcomes += 1
        for top in TOPS:
            self._within[top] += rank is not None and rank < top

    @property
    def counters(self) -> Mapping[str, float]:
        """`outcomes`, and `foreseen_topN` for each of TOPS."""
        within = {f"foreseen_top{top}": float(n) for top, n in self._within.items()}
        return {"outcomes": float(self._outcomes), **within}
