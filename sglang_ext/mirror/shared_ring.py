"""A bounded queue of fixed-size records in shared memory: one process writes, one reads.

A record is RECORD_BYTES long: a header (checksum, kind, sequence number, a few numbers, a time) and
a payload of raw bytes. Nothing is pickled, nothing is locked: the writer owns `head`, the reader
`tail`, and a process that dies leaves nothing held. The reader believes nothing: a position out of
range, a sequence number out of order or a checksum that stays wrong raises ChannelError.
"""

import mmap
import struct
import time
import zlib
from typing import NamedTuple

import numpy as np

from sglang_ext.mirror import futex

RECORD_BYTES = 1024
# checksum, kind, payload bytes, sequence number, request, first, total, length, number, items, time
_HEADER = struct.Struct("<IHHQIiiiiid")
PAYLOAD_BYTES = RECORD_BYTES - _HEADER.size
# Before the records: head, tail and the bell, each on a cache line of its own.
CONTROL_BYTES = 192
_HEAD, _TAIL, _BELL = 0, 64, 128
_CHECKSUM_BYTES = 4
# A store that was published before its record is seen on machines that reorder stores.
_TRIES, _TRY_S = 50, 1e-4


class ChannelError(RuntimeError):
    """The other side has written what cannot be; the channel is of no more use."""


class Record(NamedTuple):
    """A message. What the numbers mean depends on the kind (messages.py)."""

    kind: int
    request: int = 0
    first: int = 0
    total: int = 0
    length: int = 0
    number: int = 0
    items: int = 0
    time: float = 0.0
    payload: bytes = b""


def ring_bytes(capacity: int) -> int:
    """Shared memory that a ring of `capacity` records takes."""
    return CONTROL_BYTES + capacity * RECORD_BYTES


class SharedRing:
    """One direction of a channel.

    Args:
        memory: the shared memory.
        offset: where the ring's part of it begins, a multiple of 64.
        capacity: records that it holds.
    """

    def __init__(self, memory: mmap.mmap, offset: int, capacity: int) -> None:
        self._memory = memory
        self._records_at = offset + CONTROL_BYTES
        self._capacity = capacity
        self._head = np.frombuffer(memory, np.uint64, 1, offset + _HEAD)
        self._tail = np.frombuffer(memory, np.uint64, 1, offset + _TAIL)
        self._bell = np.frombuffer(memory, np.uint32, 1, offset + _BELL)
        self._bell_at = self._bell.ctypes.data
        self._written = int(self._head[0])
        self._read = int(self._tail[0])

    def put(self, record: Record) -> bool:
        """Write a record; False where there is no room. Who waits is woken by `ring`.

        Raises:
            ChannelError: the reader has moved to where nothing was written.
            ValueError: the payload is too long.
        """
        size = len(record.payload)
        if size > PAYLOAD_BYTES:
            raise ValueError(f"a payload has at most {PAYLOAD_BYTES} bytes, got {size}")
        waiting = self._written - int(self._tail[0])
        if not 0 <= waiting <= self._capacity:
            raise ChannelError(f"{waiting} records wait in a ring of {self._capacity}")
        if waiting == self._capacity:
            return False
        at = self._records_at + self._written % self._capacity * RECORD_BYTES
        body = at + _HEADER.size
        numbers = record[1:8]
        _HEADER.pack_into(self._memory, at, 0, record.kind, size, self._written, *numbers)
        self._memory[body : body + size] = record.payload
        checksum = zlib.crc32(self._memory[at + _CHECKSUM_BYTES : body + size])
        struct.pack_into("<I", self._memory, at, checksum)
        self._written += 1
        self._head[0] = self._written
        return True

    def ring(self) -> None:
        """Wake the reader, if it waits."""
        self._bell[0] = (int(self._bell[0]) + 1) & 0xFFFFFFFF
        futex.wake(self._bell_at)

    def take(self) -> Record | None:
        """The oldest record that was not read yet; None: there is none.

        Raises:
            ChannelError: what the writer wrote cannot be a record.
        """
        waiting = int(self._head[0]) - self._read
        if waiting == 0:
            return None
        if not 0 < waiting <= self._capacity:
            raise ChannelError(f"{waiting} records wait in a ring of {self._capacity}")
        record = self._sound_record()
        self._read += 1
        self._tail[0] = self._read
        return record

    def wait(self, seconds: float) -> bool:
        """Sleep until there is something to read, at most `seconds`; whether there is."""
        heard = int(self._bell[0])
        if int(self._head[0]) == self._read and seconds > 0:
            futex.wait_while(self._bell_at, heard, seconds)
        return int(self._head[0]) != self._read

    @property
    def waiting(self) -> bool:
        """Whether there is something to read."""
        return int(self._head[0]) != self._read

    def _sound_record(self) -> Record:
        at = self._records_at + self._read % self._capacity * RECORD_BYTES
        for _ in range(_TRIES):
            raw = self._memory[at : at + RECORD_BYTES]
            checksum, kind, size, serial, *_ = _HEADER.unpack_from(raw)
            end = _HEADER.size + size
            sound = size <= PAYLOAD_BYTES and serial == self._read
            if sound and zlib.crc32(raw[_CHECKSUM_BYTES:end]) == checksum:
                request, first, total, length, number, items, at_s = _HEADER.unpack_from(raw)[4:]
                payload = raw[_HEADER.size : end]
                return Record(kind, request, first, total, length, number, items, at_s, payload)
            time.sleep(_TRY_S)
        raise ChannelError(f"record {self._read} is not sound")
