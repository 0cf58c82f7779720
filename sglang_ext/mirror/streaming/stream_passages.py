"""Texts that streams learn from: where they look ahead, and what they are to say there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Places of a text from which streams look ahead in a step; more cost more than they teach.
_PLACES = 64
_LONGEST = 512


@dataclass(frozen=True)
class Passage:
    """A text to learn from.

    Attributes:
        tokens: prompt and output.
        first: where the output begins; only what it says is learned.
    """

    tokens: Sequence[int]
    first: int


def passages_of(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]], streams: int
) -> list[Passage]:
    """Passages of (prompt, output) pairs, as far as they fit; short outputs are left out."""
    made = []
    for prompt, output in texts:
        kept = list(prompt)[-(_LONGEST // 2) :]
        passage = Passage([*kept, *output][:_LONGEST], max(len(kept), 1))
        if len(passage.tokens) - passage.first > streams:
            made.append(passage)
    return made


def places_of(passage: Passage, streams: int, rng: np.random.Generator | None = None) -> list[int]:
    """Places, in rising order, behind which all that the streams are to say is in the output.

    Args:
        rng: draws them where there are too many; None: they are spread evenly.
    """
    every = np.arange(passage.first - 1, len(passage.tokens) - streams - 1)
    if len(every) > _PLACES:
        evenly = (np.arange(_PLACES) * (len(every) / _PLACES)).astype(int)
        chosen = every[evenly] if rng is None else rng.choice(every, _PLACES, replace=False)
        every = np.sort(chosen)
    return [int(place) for place in every]


def future_of(passage: Passage, places: Sequence[int], streams: int) -> torch.Tensor:
    """int64[places, streams]: stream j (0 is the first) is to say the token j + 2 behind a place.

    The token behind the place is the main stream's.
    """
    return torch.tensor([list(passage.tokens[p + 2 : p + 2 + streams]) for p in places])
