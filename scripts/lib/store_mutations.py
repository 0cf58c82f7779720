"""Small datastore folders, and every way in which fuzz_store makes them wrong."""

import copy
import json
import os
import socket
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from datastores import Datastore
from datastores.log_names import LogName, first_number
from datastores.manifest import is_name
from datastores.segment import Document
from datastores.wal import Deletion, LogWriter, framed, new_header

VOCAB = 500
FINGERPRINT = "t"
CLASSES = ("flip", "cut", "splice", "container", "manifest", "log", "names")
_PAGE = 4096
# What no field may hold, of any type.
_ODD: tuple[Any, ...] = (
    None, True, -1, 0.5, 1 << 64, 1 << 70, "", "x", "\ud800", "x" * 600, "../../precious.txt",
    "/etc/passwd", "sub-1.idx\0", [], [[]], {}, {"a": 1}, float("inf"),
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """What was put into a folder."""

    documents: frozenset[tuple[str, tuple[int, ...]]]
    texts: frozenset[tuple[int, ...]]
    outside: Path
    """A file that no folder has a right to."""

    def has(self, namespace: str, document: tuple[int, ...]) -> bool:
        return (namespace, document) in self.documents

    def has_text(self, document: tuple[int, ...]) -> bool:
        return document in self.texts

    def with_document(self, namespace: str, document: tuple[int, ...]) -> "Known":
        return replace(self, documents=self.documents | {(namespace, document)})


def templates(folder: Path) -> list[tuple[Path, Known]]:
    """Folders that are right: files and logs, logs alone, with a deletion, with a corpus; the last
    one a fleet's, with a member's log."""
    folder.mkdir()
    outside = folder.parent / "precious.txt"
    outside.write_text("precious")
    made = []
    for number, (folded, deletes, corpus) in enumerate(
        [(True, False, True), (False, True, False), (True, True, True), (True, False, False)]
    ):
        fleet = number == 3
        path = folder / str(number)
        rng = np.random.default_rng(number)
        documents, texts = set(), set()
        with Datastore.open(
            path,
            vocab_size=VOCAB,
            tokenizer_fingerprint=FINGERPRINT,
            live_interval=0.0,
            shared=fleet,
        ) as store:
            if corpus:
                text = tuple(rng.integers(0, VOCAB, 40).tolist())
                texts.add(text)
                store.add_corpus("c", [text])
            for k in range(8):
                document = (1, 2, 3, *rng.integers(0, VOCAB, 12).tolist())
                documents.add(("ab"[k % 2], document))
                store.add(document, "ab"[k % 2], name=f"r{k}")
                if folded and k == 4:
                    store.fold(60)
            if deletes:
                store.flush(60)
                # Damage may take the deletion and leave the document: it is right data then.
                documents.add(("gone", (9, 9, 9)))
                store.add((9, 9, 9), "gone", name="gone")
                store._served._logs.delete("gone", None, lambda deletion: None)  # type: ignore
        if fleet:
            _add_member(path, documents)
        made.append((path, Known(frozenset(documents), frozenset(texts), outside)))
    return made


def _add_member(path: Path, documents: set[tuple[str, tuple[int, ...]]]) -> None:
    """A log of a member that has ended, with a document and a deletion."""
    log = LogWriter(str(path / LogName("0123abcd", 1, 2).file), VOCAB, FINGERPRINT)
    first = first_number(2)
    documents.add(("a", (1, 2, 7)))
    log.append("a", Document(np.array([1, 2, 7], np.int32), first))
    log.append_deletion(Deletion(first_number(3), "gone"))
    log.close()


def mutate(path: Path, known: Known, kind: str, rng: np.random.Generator) -> None:
    """Makes a folder wrong, in one of CLASSES' ways."""
    if kind == "names":
        return _odd_name(path, known, rng)
    wanted = {"container": "sub-*", "manifest": "MANIFEST", "log": "[lm]*-*"}.get(kind, "[!L]*")
    files = sorted(path.glob(wanted))
    if not files:
        return None
    file = files[int(rng.integers(len(files)))]
    data = bytearray(file.read_bytes())
    if kind == "container":
        data = _wrong_container(data, rng)
    elif kind == "manifest":
        data = _wrong_manifest(data, rng)
    elif kind == "log":
        data = _wrong_log(data, rng)
    elif kind == "flip":
        for _ in range(int(rng.integers(1, 9))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif kind == "cut":
        data = data[: int(rng.integers(len(data)))]
    else:
        data = _spliced(data, files, rng)
    # Another file under the name: a follower has mapped the one that was there.
    replacement = path / ".tmp-replacement"
    replacement.write_bytes(data)
    os.replace(replacement, file)
    return None


def _spliced(data: bytearray, files: list[Path], rng: np.random.Generator) -> bytearray:
    """A part of a file replaced with, or followed by, a part of any file."""
    other = files[int(rng.integers(len(files)))].read_bytes()
    start, end = sorted(rng.integers(0, len(other) + 1, 2).tolist())
    at = int(rng.integers(len(data) + 1))
    drop = int(rng.integers(2)) * (end - start)
    return data[:at] + other[start:end] + data[at + drop :]


def _wrong_value(content: Any, rng: np.random.Generator) -> Any:
    """JSON content with one field, at any depth, replaced, removed or added."""
    content = copy.deepcopy(content)
    at = content
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = keys[int(rng.integers(len(keys)))]
        if isinstance(at[key], dict | list) and at[key] and rng.integers(3):
            at = at[key]
            continue
        how = int(rng.integers(6))
        if how == 0:
            del at[key]
        elif how == 1 and isinstance(at, dict):
            at["strange"] = 1
        else:
            # Another owner that is a name makes another right file, which nothing can tell; so does
            # a corpus that is told to be a namespace.
            legal = {"owner": is_name, "corpus": lambda v: v is None or is_name(v)}.get(str(key))
            odd = [v for v in _ODD if legal is None or not legal(v)]
            at[key] = odd[int(rng.integers(len(odd)))]
        break
    return content


def _wrong_manifest(data: bytearray, rng: np.random.Generator) -> bytearray:
    if rng.integers(20) == 0:
        return bytearray(b"[" * 100_000)
    content = _wrong_value(json.loads(data)["manifest"], rng)
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    return bytearray(json.dumps({"crc32": checksum, "manifest": content}).encode())


def _wrong_container(data: bytearray, rng: np.random.Generator) -> bytearray:
    """A header with a wrong field, or an array with a wrong element, checksums right."""
    magic, version, size, _ = struct.unpack_from("<8sIII", data)
    header = json.loads(data[20 : 20 + size])
    body = data[20 + size :]
    if rng.integers(3):
        header = _wrong_value(header, rng)
    else:
        entry = header["segments"][int(rng.integers(len(header["segments"])))]
        _spoil(entry, body, rng)
    encoded = json.dumps(header).encode()
    if rng.integers(30) == 0:
        encoded = b'{"segments":' + b"[" * 100_000
    if len(encoded) <= size:
        encoded = encoded.ljust(size)
    preamble = struct.pack("<8sIII", magic, version, len(encoded), zlib.crc32(encoded))
    return bytearray(preamble + encoded + body)


def _spoil(entry: dict[str, Any], body: bytearray, rng: np.random.Generator) -> None:
    """An element that no array of a datastore's holds there."""
    name, dtype, values = [
        ("tokens", "<u2", (VOCAB + 1, 65535, VOCAB)),
        ("suffixes", "<i4", (-1, 1 << 30, -(1 << 31))),
        ("documents", "<u8", ((1 << 64) - 1, 1 << 63, 1 << 31, 3)),
    ][int(rng.integers(3))]
    section = entry[name]
    step = {"tokens": 1, "suffixes": 1, "documents": 4}[name]
    item = np.dtype(dtype).itemsize
    index = int(rng.integers(section["count"])) * step
    at = section["offset"] + index * item
    old = np.frombuffer(body, dtype, 1, at)[0]
    value = next(v for v in values[int(rng.integers(len(values))) :] + values if v != old)
    body[at : at + item] = np.array([value], dtype).tobytes()
    nbytes = section["count"] * step * item
    padded = nbytes + -nbytes % 16
    section["crc32"] = zlib.crc32(body[section["offset"] : section["offset"] + padded])


def _wrong_log(data: bytearray, rng: np.random.Generator) -> bytearray:
    """A log of records that are whole, checksums right, and say what none may say."""
    key, log = new_header(VOCAB, FINGERPRINT)
    for _ in range(int(rng.integers(1, 4))):
        kind = int(rng.choice([0, 1, 2, 3, 255]))
        number = int(rng.choice([0, 5, 1 << 62, (1 << 63) - 1])) * 2 + int(rng.integers(2))
        name = [b"a", b"\xff\xfe", b"", b"x" * 700][int(rng.integers(4))]
        size = [len(name), len(name) + 9, 65535][int(rng.integers(3))]
        tokens = bytes(rng.integers(0, 256, int(rng.integers(0, 9)), np.uint8))
        well_formed = kind == 1 and name == b"a" and size == 1 and tokens and not len(tokens) % 2
        if well_formed and number < 1 << 62:
            tokens = struct.pack("<H", VOCAB)  # else it would be a right document
        if kind == 2 and not tokens:
            tokens = b"\0"
        payload = struct.pack("<BQ16sH", kind, number, bytes(16), size) + name + tokens
        log += framed(key, len(log), payload[: int(rng.integers(1, 60))])
    return bytearray(log)


def _odd_name(path: Path, known: Known, rng: np.random.Generator) -> None:
    """Links, folders, pipes and sockets where files are expected; names that are none."""
    names = [
        "LOCK", "MANIFEST", "log-00000002.wal", "log-00000900.wal", "sub-x", ".tmp-x",
        "log-5\u00b25.wal", "log-9999999999999999.wal", "sub-00000001-aaaaaaaa.idx",
        "member-0123abcd-00000001-00000002.wal", "member-0123abcd-00000009-99999999.wal",
        "member-ffffffff-9999999999999999-00000001.wal",
        *(file.name for file in path.iterdir()),
    ]  # fmt: skip
    at = path / names[int(rng.integers(len(names)))]
    at.unlink(missing_ok=True)
    how = int(rng.integers(8))
    if how == 0:
        at.mkdir()
        (at / "inside").write_text("x")
    elif how == 1:
        at.symlink_to(known.outside)
    elif how == 2:
        at.symlink_to("/dev/zero")
    elif how == 3:
        at.symlink_to(at)
    elif how == 4:
        os.mkfifo(at)
    elif how == 5:
        with socket.socket(socket.AF_UNIX) as listener:
            here = os.open(path, os.O_PATH)
            listener.bind(f"/proc/self/fd/{here}/{at.name}")
            os.close(here)
    elif how == 6:
        os.link(known.outside, at)
    else:
        at.write_bytes(b"")
