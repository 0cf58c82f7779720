"""Which differences between two greedy outputs the arithmetic explains.

Two right implementations round differently (a product of 16 rows against one of 1, split KV), so
that they may choose differently where the two best logits are a rounding step or two apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Of bfloat16: 8 significant bits, the hidden one included.
MANTISSA_BITS = 7
TIE_ULPS = 2.0


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

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.ulps <= TIE_ULPS


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
