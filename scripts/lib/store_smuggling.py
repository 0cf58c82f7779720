"""Outputs that hold whole log records, in logs that are cut at each byte."""

import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np

from datastores.segment import NO_DIGEST, Document, document_digest
from datastores.wal import LogTail, LogWriter, framed, new_header, read_log

VOCAB = 65_000
FINGERPRINT = "smuggling"
_VICTIM = "victim-tenant"
_PAYLOAD = struct.Struct("<BQ16sH")
_TRIES = 1000


def smuggled(every: int = 1) -> tuple[int, int]:
    """(cut points, records taken from inside others), over logs of both formats.

    every: look at each so many-th cut only.
    """
    points = taken = 0
    with tempfile.TemporaryDirectory(prefix="smuggling-") as folder:
        for name, log in (("v1", _log_v1()), ("v2", _log_v2(Path(folder) / "made"))):
            path = Path(folder) / name
            for cut in range(0, len(log) + 1, every):
                path.write_bytes(log[:cut])
                points += 1
                taken += _taken(read_log(str(path), VOCAB, FINGERPRINT))
                tail = LogTail(str(path), VOCAB, FINGERPRINT)
                taken += _taken(tail.read())
                path.write_bytes(log)  # as if the writer had gone on meanwhile
                taken += _taken(tail.read())
            for at in range(0, len(log), every):  # and one damaged byte anywhere
                path.write_bytes(log[:at] + bytes([log[at] ^ 0x10]) + log[at + 1 :])
                points += 1
                taken += _taken(read_log(str(path), VOCAB, FINGERPRINT))
    return points, taken


def _taken(content) -> int:
    return len(content.deletions) + sum(name == _VICTIM for name, _ in content.documents)


def attack() -> np.ndarray:
    """int32: tokens of an output in which whole records stand, of all formats, as uint16."""
    document = _PAYLOAD.pack(1, 1 << 40, NO_DIGEST, len(_VICTIM)) + _VICTIM.encode()
    deletion = _PAYLOAD.pack(2, 1 << 40, NO_DIGEST, 0)
    guessed = _guessed_key()
    parts = []
    for payload in (document + b"\x01\x00\x02\x00", deletion):
        parts.append(_fitting(payload, lambda p: _framed_v1(p)))
        parts.append(_fitting(payload, lambda p: framed(bytes(16), 0, p)))
        parts.append(_fitting(payload, lambda p: framed(guessed, 52, p)))
    return np.frombuffer(b"".join(parts), np.uint16).astype(np.int32)


def _guessed_key() -> bytes:
    """A key as an attacker may guess one, all of whose uint16 are tokens: it opens a record."""
    while True:
        key, _ = new_header(VOCAB, FINGERPRINT)
        if np.frombuffer(key, np.uint16).max() < VOCAB:
            return key


def _fitting(payload: bytes, frame) -> bytes:
    """A record all of whose uint16 are tokens, by trying numbers."""
    for k in range(_TRIES):
        changed = payload[:1] + struct.pack("<Q", (1 << 40) + k) + payload[9:]
        record = frame(changed)
        record += b"\0" * (len(record) % 2)
        if np.frombuffer(record, np.uint16).max() < VOCAB:
            return record
    raise RuntimeError("no record's bytes are all tokens")


def _framed_v1(payload: bytes) -> bytes:
    return struct.pack("<III", 0x4C4F4752, len(payload), zlib.crc32(payload)) + payload


def _outputs() -> list[Document]:
    rng = np.random.default_rng(0)
    plain = [rng.integers(0, VOCAB, 50).astype(np.int32) for _ in range(3)]
    return [
        Document(t, k) for k, t in enumerate([plain[0], attack(), plain[1], attack(), plain[2]])
    ]


def _log_v1() -> bytes:
    header = struct.pack("<8sII16s", b"TOKENLOG", 1, VOCAB, document_digest(FINGERPRINT))
    log = header + struct.pack("<I", zlib.crc32(header))
    for output in _outputs():
        head = _PAYLOAD.pack(1, output.number, output.digest, 1) + b"a"
        log += _framed_v1(head + output.tokens.astype(np.uint16).tobytes())
    return log


def _log_v2(path: Path) -> bytes:
    writer = LogWriter(str(path), VOCAB, FINGERPRINT)
    for output in _outputs():
        writer.append("a", output)
    writer.close()
    return path.read_bytes()
