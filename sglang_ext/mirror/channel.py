"""The token channel: two rings of records in memory that two processes share.

The memory has no name in any file system (memfd_create(2)): the other process opens it through
/proc, and it is gone with the last of the two, whatever ends them.
"""

import mmap
import os
import struct
import time

from sglang_ext.mirror.shared_ring import ChannelError, Record, SharedRing, ring_bytes

CAPACITY = 4096  # records in either direction: 4 MiB each
_MAGIC, _VERSION = b"sgxmirr\0", 1
_PREAMBLE = struct.Struct("<8sII")  # magic, version, capacity
_PREAMBLE_BYTES = 64
_MOST_RECORDS = 1 << 16
# Spinning pays where the answer comes within microseconds; where the last wait was longer, the
# next one sleeps at once.
_SPIN_S, _SHORT_S = 5e-5, 1e-4


class Channel:
    """One end of a channel; not for several threads at once.

    Args:
        descriptor: of the shared memory.
        size: its size in bytes.
        capacity: records in either direction.
        creator: whether this is the end that made the memory.
    """

    def __init__(self, descriptor: int, size: int, capacity: int, creator: bool) -> None:
        self._descriptor = descriptor
        memory = mmap.mmap(descriptor, size)
        first = SharedRing(memory, _PREAMBLE_BYTES, capacity)
        second = SharedRing(memory, _PREAMBLE_BYTES + ring_bytes(capacity), capacity)
        self._out, self._in = (first, second) if creator else (second, first)
        self._last_wait_s = 1.0

    @classmethod
    def create(cls, capacity: int = CAPACITY) -> "Channel":
        """Make a channel, for another process to `open` by its `path`.

        Raises:
            OSError: there is no memory for it.
        """
        size = _PREAMBLE_BYTES + 2 * ring_bytes(capacity)
        descriptor = os.memfd_create("sglang-ext-mirror")
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, _PREAMBLE.pack(_MAGIC, _VERSION, capacity), 0)
            return cls(descriptor, size, capacity, creator=True)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: str) -> "Channel":
        """The other end of the channel at `path`.

        Raises:
            OSError: it is not there.
            ChannelError: it is no channel of this version.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            raw = os.pread(descriptor, _PREAMBLE.size, 0)
            magic, version, capacity = (
                _PREAMBLE.unpack(raw) if len(raw) == _PREAMBLE.size else (b"", 0, 0)
            )
            size = os.fstat(descriptor).st_size
            known = magic == _MAGIC and version == _VERSION and 0 < capacity <= _MOST_RECORDS
            if not known or size != _PREAMBLE_BYTES + 2 * ring_bytes(capacity):
                raise ChannelError(f"{path} is no channel of version {_VERSION}")
            return cls(descriptor, size, capacity, creator=False)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def path(self) -> str:
        """Where a process of the same user opens the other end, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def send(self, *records: Record) -> int:
        """Send records, and wake the other side; returns how many there was room for.

        Raises:
            ChannelError: the other side has broken the channel.
        """
        sent = 0
        for record in records:
            if not self._out.put(record):
                break
            sent += 1
        if sent:
            self._out.ring()
        return sent

    def receive(self, limit: int = CAPACITY) -> list[Record]:
        """What has come, at most `limit` records.

        Raises:
            ChannelError: the other side has broken the channel.
        """
        records: list[Record] = []
        while len(records) < limit and (record := self._in.take()) is not None:
            records.append(record)
        return records

    def wait(self, seconds: float) -> bool:
        """Wait until something has come, at most `seconds`; whether it has.

        It spins for some microseconds where the last wait was as short, and sleeps otherwise.
        """
        begun = time.perf_counter()
        spin_until = begun + (min(_SPIN_S, seconds) if self._last_wait_s < _SHORT_S else 0.0)
        while not self._in.waiting and time.perf_counter() < spin_until:
            pass
        end = begun + seconds
        while not self._in.waiting and (left := end - time.perf_counter()) > 0:
            self._in.wait(left)
        self._last_wait_s = time.perf_counter() - begun
        return self._in.waiting

    def close(self) -> None:
        """Let go of the memory; it is freed when the other end has as well."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
