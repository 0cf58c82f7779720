"""Whether tokens stand in anything that an object holds, in whatever form Python code can keep."""

import gc
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np

# What leads from an object to the whole program.
_ENDS = (ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType, type)


def holders(root: Any, tokens: Sequence[int]) -> list[str]:
    """The types of what is reachable from `root` and has `tokens` in this order, one after another.

    Searched are arrays (their memory once, whichever of them own it), byte strings as 16, 32 and
    64-bit integers, and sequences of numbers.
    """
    wanted = list(tokens)
    return [type(value).__name__ for value in reachable(root) if _has(value, wanted)]


def reachable(root: Any) -> Iterator[Any]:
    """All objects that `root` refers to, itself included, each once."""
    seen: set[int] = set()
    waiting: deque[Any] = deque([root])
    while waiting:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, _ENDS):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, np.ndarray) and value.base is not None:
            waiting.append(value.base)
        waiting.extend(gc.get_referents(value))


def _has(value: Any, wanted: list[int]) -> bool:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return _stands_in(np.ravel(value), wanted)
    if isinstance(value, array) and value.typecode not in "uwfd":
        return _stands_in(np.asarray(value), wanted)
    if isinstance(value, bytes | bytearray) and len(value) >= 2 * len(wanted):
        needles = (np.array(wanted, dtype=f"<{kind}").tobytes() for kind in ("u2", "u4", "u8"))
        return any(needle in value for needle in needles)
    if isinstance(value, list | tuple | deque) and len(value) >= len(wanted):
        if not all(isinstance(x, int | np.integer) for x in value):
            return False
        return _stands_in(np.array(value, dtype=object), wanted)
    return False


def _stands_in(values: np.ndarray, wanted: list[int]) -> bool:
    starts = np.flatnonzero(values[: len(values) - len(wanted) + 1] == wanted[0])
    return any(values[i : i + len(wanted)].tolist() == wanted for i in starts)
