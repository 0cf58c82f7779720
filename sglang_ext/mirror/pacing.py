"""How long a step waits for its draft: learned from how steps and drafts went before."""

import time
from collections.abc import Sequence

from sglang_ext.mirror.payoff import another_pays, length_that_pays

# No step waits longer for a draft; and so long where nothing is known yet.
MOST_WAIT_S, FIRST_WAIT_S = 1.0, 0.25
_FADE = 0.1
_ALPHA_FADE = 0.025
_FIRST_ALPHA, _MOST_ALPHA = 0.7, 0.98
# Where waiting does not pay, it is tried again so often: what is known of it grows old.
_TRY_EVERY = 32


class Pacing:
    """What a server's steps and drafts take.

    Attributes:
        alpha: how likely a drafted token is right once those before it are.
        step_s: seconds that the target's pass takes; None: not known yet.
        token_s: seconds of waiting for another drafted token; None: not known yet.
    """

    def __init__(self) -> None:
        self.alpha = _FIRST_ALPHA
        self.step_s: float | None = None
        self.token_s: float | None = None
        self._proposed_at: float | None = None
        self._unpaid = 0

    def note_draft(self, right: int, wrong: int) -> None:
        """Of a draft so many tokens were right, and then so many, 0 or 1, wrong."""
        for outcome in [_MOST_ALPHA] * right + [0.0] * wrong:
            self.alpha += _ALPHA_FADE * (outcome - self.alpha)

    def note_proposed(self) -> None:
        """A step's draft is there: its pass begins."""
        self._proposed_at = time.perf_counter()

    def note_committed(self) -> None:
        """The first that is heard of a step behind its draft: its pass has ended."""
        if self._proposed_at is not None:
            taken, self._proposed_at = time.perf_counter() - self._proposed_at, None
            self.step_s = _faded(self.step_s, taken)

    def note_wait(self, seconds: float, tokens: int, in_time: bool) -> None:
        """A step waited for so many tokens.

        Args:
            in_time: they came.
        """
        if in_time or self.token_s is None:
            self.token_s = _faded(self.token_s, seconds / tokens)

    def another_pays(
        self,
        chains: Sequence[Sequence[float]],
        waiting: Sequence[Sequence[float]],
        waited_s: float,
    ) -> bool:
        """Whether to wait on for another token, by how sure the draft model is of its chains.

        Args:
            chains, waiting: as payoff.another_pays takes them.
            waited_s: seconds that the step has waited.
        """
        if self.step_s is None or self.token_s is None:
            return True
        so_far_s = self.step_s + waited_s
        return another_pays(chains, waiting, self.alpha, self.token_s, so_far_s)

    def length(self, able: Sequence[int], others: Sequence[int], most: int) -> tuple[int, float]:
        """How long chains to wait for, 0 for none, and for how many seconds at most.

        Args:
            able: tokens that are drafted already of each request that could get more.
            others: of each that could not.
            most: longest chain.
        """
        if not able or min(able) >= most:
            return 0, 0.0
        if self.step_s is None or self.token_s is None:
            return most, min(FIRST_WAIT_S, MOST_WAIT_S)
        ready = [*able, *others]
        length, wait_s = length_that_pays(self.alpha, self.token_s, self.step_s, ready, most)
        if length <= min(able):
            self._unpaid += 1
            if self._unpaid % _TRY_EVERY:
                return 0, 0.0
            length, wait_s = min(able) + 1, self.step_s
        return length, min(wait_s, MOST_WAIT_S)


def _faded(known: float | None, seen: float) -> float:
    return seen if known is None else known + _FADE * (seen - known)
