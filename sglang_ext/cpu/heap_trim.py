"""Memory that malloc holds on to, given back to the system from time to time.

Activations of a pass are freed between tensors that stay, and glibc keeps such pages: a server
under mixed traffic came to hold 410 MiB of them in 20 minutes (scripts/soak_server.py). Giving
400 MiB back takes 30 ms, looking in vain 1 ms.

SGLANG_EXT_CPU_TRIM_SECONDS says how often, 60 where it is not set; 0 turns it off.
"""

import ctypes
import logging
import os
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

TRIM_VARIABLE = "SGLANG_EXT_CPU_TRIM_SECONDS"
DEFAULT_SECONDS = 60.0


# musl and macOS have none.
_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back() -> None:
    """Give what malloc holds on to back to the system at once, where the C library can."""
    if _TRIM is not None:
        _TRIM(0)


class HeapTrim:
    """Trims the heap of this process once in a while.

    Args:
        seconds: between two times, at least; 0 or less: never. None: by the variable.
        trim: malloc_trim(3) of the C library; None: this process's, if it has one.

    Raises:
        ValueError: the variable is no number; the message names it.
    """

    def __init__(self, seconds: float | None = None, trim: Callable[[int], int] | None = None):
        self._seconds = _configured_seconds() if seconds is None else seconds
        self._trim = trim or _TRIM
        self._due = time.monotonic() + self._seconds

    def trim_if_due(self) -> bool:
        """Whether it was time; all threads that allocate wait for the end."""
        if self._trim is None or self._seconds <= 0 or time.monotonic() < self._due:
            return False
        start = time.monotonic()
        self._trim(0)
        end = time.monotonic()
        self._due = end + self._seconds
        logger.debug("gave free heap back to the system in %.1f ms", 1e3 * (end - start))
        return True


def _configured_seconds() -> float:
    text = os.environ.get(TRIM_VARIABLE, "")
    try:
        return float(text) if text else DEFAULT_SECONDS
    except ValueError:
        raise ValueError(
            f"{TRIM_VARIABLE} must be a number of seconds (0: never), got {text!r}"
        ) from None
