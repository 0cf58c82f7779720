"""Waiting in tests: for a condition, never for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.02


def eventually(condition: Callable[[], T], seconds: float = 60.0, what: str = "") -> T:
    """The first value of `condition` that is true.

    Args:
        seconds: how long to wait for it.
        what: what should have happened, for the failure's message.

    Raises:
        AssertionError: time ran out; it tells the last value.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what or value!r}"
        time.sleep(_POLL_S)
    return value
