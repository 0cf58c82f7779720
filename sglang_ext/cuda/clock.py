"""How long steps take on the device, without waiting for it."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

# Steps whose end was not seen yet; a device is never that far behind.
_MOST_OPEN = 64


class StepClock:
    """Times steps by events on the current stream, which are read once they have passed.

    Args:
        device: of the stream, "cuda".
    """

    def __init__(self, device: str) -> None:
        self._module: Any = torch.get_device_module(device)
        self._open: deque[tuple[Any, Any, Callable[[float], None]]] = deque(maxlen=_MOST_OPEN)
        self._begun: Any = None

    def begin(self) -> None:
        """A step's work is queued from here on."""
        self._begun = self._event()

    def end(self, note: Callable[[float], None]) -> None:
        """All of it is queued; `collect` calls `note` with its seconds once it has run."""
        self._open.append((self._begun, self._event(), note))

    def collect(self) -> None:
        """Tell of the steps that have ended since."""
        while self._open and self._open[0][1].query():
            begun, ended, note = self._open.popleft()
            note(begun.elapsed_time(ended) / 1e3)

    def _event(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event
