"""Which differences between two greedy outputs the arithmetic explains.

Two right implementations round differently (a product of 16 rows against one of 1, split KV), so
that they may choose differently where the two best logits are close. How close that is depends on
the target: roundings add up over its layers. So it is measured on plain SGLang alone, whose decode
steps and prefills compute the same logits in different shapes (`Rounding`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Of bfloat16: 8 significant bits, the hidden one included.
MANTISSA_BITS = 7
TIE_ULPS = 2.0
# What is explained is this many times what plain SGLang was seen to move by itself, in some hundred
# tokens. What reads a wrong row or mask moves logits by whole candidates.
ROUNDING_MARGIN = 2.0


def ulp(value: float) -> float:
    """The distance between bfloat16 numbers at the scale of `value`."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    return 2.0 ** (math.floor(math.log2(abs(value))) - MANTISSA_BITS)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two outputs part; None: they are equal. One that ends early parts at its end."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True)
class Rounding:
    """How far plain SGLang's own arithmetic moves one token's figures.

    Attributes:
        logprob: the largest difference of a best token's logprob.
        gap: the largest difference of the distance between the best token and another candidate.
    """

    logprob: float = 0.0
    gap: float = 0.0

    @classmethod
    def between(
        cls, pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]
    ) -> "Rounding":
        """Of two computations of the same contexts' logprobs by token, the largest ones."""
        logprob = gap = 0.0
        for ours, theirs in pairs:
            best = max(ours, key=lambda token: ours[token])
            if best not in theirs:
                continue
            logprob = max(logprob, abs(ours[best] - theirs[best]))
            for token in ours.keys() & theirs.keys():
                moved = (ours[best] - ours[token]) - (theirs[best] - theirs[token])
                gap = max(gap, abs(moved))
        return cls(logprob, gap)


@dataclass(frozen=True)
class Divergence:
    """A place where two outputs part, with the target's logits there.

    Attributes:
        at: tokens that they share.
        gap: how far the worse of the two tokens is below the best logit.
        ulps: the gap in bfloat16 steps at the best logit's scale.
    """

    at: int
    gap: float
    ulps: float

    def is_tie(self, rounding: Rounding) -> bool:
        """Whether rounding explains it."""
        if not math.isfinite(self.ulps):
            return False
        return self.ulps <= TIE_ULPS or self.gap <= ROUNDING_MARGIN * rounding.gap


def judge(at: int, tokens: Sequence[int], logits: Mapping[int, float]) -> Divergence:
    """A divergence between `tokens`, from the largest logits of the same context.

    Args:
        logits: by token, the target's largest ones (2 at least). A token that is not among them
            counts as the smallest of them: its gap is that large or larger.
    """
    best, least = max(logits.values()), min(logits.values())
    worst = min(logits.get(token, least) for token in tokens)
    missing = any(token not in logits for token in tokens)
    gap = best - worst
    step = ulp(best)
    ulps = gap / step if step else (0.0 if gap == 0 else math.inf)
    return Divergence(at, gap, math.inf if missing and ulps <= TIE_ULPS else ulps)
