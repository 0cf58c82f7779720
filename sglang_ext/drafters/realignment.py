"""Where an output goes on in the one before it, once the two have parted.

SSBD (section on limits) drafts the previous output up to the first disagreement and leaves what
follows to future work. Here the previous output is followed further: behind a run of tokens that
the new output has written too, or else beside the place where the two parted, with the new token
standing for one old token, for none, or for two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_ext.tree import SOURCE_PREVIOUS, SOURCE_REALIGNED, TokenTree, merged

# Chance that the token behind a matched run of 1, 2, ... tokens is the next one; measured on
# re-translations (scripts/bench_ssbd.py) and corrected as the server runs (budget.Calibration).
_BEHIND_RUN = (0.45, 0.7, 0.85, 0.9)
# Where nothing matches: one old token replaced, a new one put in, an old one left out.
_BESIDE = ((0, 0.3), (-1, 0.15), (1, 0.1))
# Chance of each further token once the first was right.
_FURTHER = 0.85
# Chance of each token while the two outputs agree.
_AGREED = 0.97
# Runs further than this from where the outputs parted are chance.
_FAR = 12
LONGEST_RUN = len(_BEHIND_RUN)
"""Tokens of a run that are looked at."""


@dataclass
class PreviousOutput:
    """A previous output, followed by the one that replaces it.

    Attributes:
        tokens: the previous output.
        agreed: whether the new output is a beginning of it so far.
    """

    tokens: Sequence[int]
    agreed: bool = True
    _seen: int = 0
    """Tokens of the new output that were followed."""
    _next: int = 0
    """Where in `tokens` the new output goes on, as far as is known."""
    _run: int = 0
    """How many tokens in front of `_next` are the new output's last ones."""

    def follow(self, output: Sequence[int]) -> None:
        """Take in the new output, which begins with what was followed before."""
        for end in range(self._seen + 1, len(output) + 1):
            self.step(output[max(0, end - LONGEST_RUN) : end])
        self._seen = max(self._seen, len(output))

    @property
    def place(self) -> int:
        """Where in `tokens` the new output goes on, as far as is known."""
        return self._next

    @property
    def run(self) -> int:
        """How many tokens in front of `place` are the new output's last ones; 0 while it agrees."""
        return self._run

    def meet(self, place: int) -> None:
        """The new output goes on at `place`: its last tokens are those in front of it."""
        self.agreed, self._run, self._next = False, LONGEST_RUN, place

    def expected(self) -> Sequence[int]:
        """What is left of the previous output; nothing once the two have parted."""
        return self.tokens[self._next :] if self.agreed else ()

    def realigned(self) -> Sequence[int]:
        """What is left of it behind a run that both have; nothing where they do not meet."""
        return self.tokens[self._next :] if self._run else ()

    def drafts(self, max_nodes: int) -> TokenTree:
        """What may follow, best first: one chain where the outputs meet, branches where not."""
        if self.agreed:
            chain = TokenTree.chain(self.tokens[self._next : self._next + max_nodes], _AGREED)
            return _from(SOURCE_PREVIOUS, chain)
        if self._run:
            return self._chain(self._next, _BEHIND_RUN[self._run - 1], max_nodes)
        chains = [self._chain(self._next + by, first, max_nodes) for by, first in _BESIDE]
        return merged(chains, max_nodes)

    def step(self, output: Sequence[int]) -> None:
        """Take in one more token of the new output.

        Args:
            output: its last tokens, at least LONGEST_RUN of them or all; the new one is the last.
        """
        token = output[-1]
        if self.agreed and self._next < len(self.tokens) and self.tokens[self._next] == token:
            self._next += 1
            return
        self.agreed = False
        runs = [
            (self._run_before(place, output), -abs(place - self._next - 1), place)
            for place in range(
                max(1, self._next + 1 - _FAR), min(len(self.tokens), self._next + 1 + _FAR) + 1
            )
        ]
        self._run, _, place = max(runs, default=(0, 0, 0))
        self._next = place if self._run else self._next + 1

    def _run_before(self, place: int, output: Sequence[int]) -> int:
        run = 0
        while (
            run < min(LONGEST_RUN, place, len(output))
            and self.tokens[place - 1 - run] == output[-1 - run]
        ):
            run += 1
        return run

    def _chain(self, start: int, first: float, max_nodes: int) -> TokenTree:
        tokens = self.tokens[max(start, 0) : max(start, 0) + max_nodes]
        return _from(SOURCE_REALIGNED, TokenTree.chain(tokens, _FURTHER, first))


def _from(source: int, tree: TokenTree) -> TokenTree:
    return replace(tree, sources=np.full(len(tree), source, dtype=np.int8))
