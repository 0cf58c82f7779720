"""Keys of texts: 64-bit numbers that both ends of the channel compute for themselves.

A continuation is told by the key of the text that it continues, so that neither end must know how
far the other one is: what was drafted for another outcome is found under no key that is asked for.
The key of t_1 .. t_n is the sum of (t_i + 1) * B^(n-i) modulo 2^64: one more token costs one
product. Two texts of one key would cost a draft, never an output.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
EMPTY = 0


def extended(key: int, token: int) -> int:
    """The key of a text with `token` behind it, from the key of the text."""
    return (key * _BASE + token + 1) & _MASK


def of_text(tokens: Sequence[int] | npt.NDArray[np.int32], key: int = EMPTY) -> int:
    """The key of a text behind which `tokens` stand, from the key of the text."""
    if len(tokens) < 32:
        for token in tokens:
            key = extended(key, int(token))
        return key
    values = np.asarray(tokens).astype(np.uint64) + np.uint64(1)
    powers = np.full(len(values), _BASE, dtype=np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    added = int(np.sum(values * powers[::-1], dtype=np.uint64))
    return (key * pow(_BASE, len(values), 1 << 64) + added) & _MASK
