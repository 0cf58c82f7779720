"""CUDA's streams, events and late copies to the host, for tensors that are all on the CPU.

Kernels run at once, as on a device that is infinitely fast. What a device does late and a CPU at
once is a non-blocking copy to pinned memory: here its destination holds a poison (-1, NaN) until
the host waits for it, by an event or a stream that the copy is part of. So code that reads a
result without waiting reads the poison, where a plain CPU tensor would hide the mistake.
"""

import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch


class _Copy:
    """One copy to the host: its source as it was when the copy was issued."""

    def __init__(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._destination, self._source = destination, source.detach().clone()
        self.landed = False
        _poison(destination, self._source)

    def land(self) -> None:
        if not self.landed:
            self.landed = True
            torch.Tensor.copy_(self._destination, self._source)


def _poison(destination: torch.Tensor, source: torch.Tensor) -> None:
    if destination.dtype == torch.bool:
        torch.Tensor.copy_(destination, ~source)
    else:
        destination.fill_(float("nan") if destination.dtype.is_floating_point else -1)


class Stream:
    """As torch.cuda.Stream; it holds the copies that were issued on it and did not land yet."""

    _handles = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.cuda_stream = next(self._handles)
        self._copies: list[_Copy] = []

    def issue(self, copies: Iterable[_Copy]) -> None:
        """The copies come before what is issued on this stream from now on."""
        both = dict.fromkeys([*self._copies, *copies])  # in order, each once
        self._copies = [copy for copy in both if not copy.landed]

    def copies(self) -> list[_Copy]:
        """Those that did not land yet."""
        return [copy for copy in self._copies if not copy.landed]

    def synchronize(self) -> None:
        for copy in self._copies:
            copy.land()
        self._copies = []

    def query(self) -> bool:
        return not self.copies()

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.issue(stream.copies())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """As torch.cuda.Event. The first query after a record says no: a device is never done yet."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._timed = enable_timing
        self._copies: list[_Copy] = []
        self._recorded_at: float | None = None
        self._asked = True

    def record(self, stream: Stream | None = None) -> None:
        self._copies = (stream or current_stream()).copies()
        self._recorded_at = time.perf_counter()
        self._asked = False

    def query(self) -> bool:
        if not self._asked:
            self._asked = True
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._asked = True
        for copy in self._copies:
            copy.land()
        self._copies = []

    def wait(self, stream: Stream | None = None) -> None:
        """Later work on `stream` comes behind the event; the host does not wait."""
        (stream or current_stream()).issue(self._copies)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_at is None or end._recorded_at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * (end._recorded_at - self._recorded_at)


class _Current(threading.local):
    """The stream that a thread issues on, as CUDA's."""

    def __init__(self) -> None:
        self.stream = _DEFAULT


_DEFAULT = Stream()
_current = _Current()


def current_stream(device: Any = None) -> Stream:
    """The stream that this thread issues on."""
    return _current.stream


class StreamContext:
    """As torch.cuda.StreamContext; may be entered again, also within itself."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(_current.stream)
        _current.stream = self._stream or _current.stream

    def __exit__(self, *_: Any) -> None:
        _current.stream = self._before.pop()


class Pinned(torch.Tensor):
    """A tensor of pinned host memory: a non-blocking copy into it lands late."""

    # What is made of it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "Pinned":
        if not non_blocking:
            return super().copy_(source)  # type: ignore[return-value]
        current_stream().issue([_Copy(self.as_subclass(torch.Tensor), source)])
        return self


def pinned_empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """torch.empty, where pinned memory can be had without CUDA."""
    made = torch.empty(*size, **options)
    return made.as_subclass(Pinned) if pin_memory else made


def async_d2h(tensor: torch.Tensor) -> torch.Tensor:
    """As sglang.srt.utils.common.async_d2h: a copy of a device tensor that lands late."""
    host = pinned_empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
