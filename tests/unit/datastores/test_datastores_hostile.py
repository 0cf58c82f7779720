"""Folders from elsewhere, records inside outputs, and disks that fail."""

import errno
import json
import os
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

import datastores.durable
import datastores.merging
from datastores import Datastore, DatastoreError, DeletionPending, verify_folder
from datastores.files import ANY_OWNER
from datastores.records import document_payload
from datastores.segment import Document, document_digest
from datastores.wal import framed, new_header, read_log
from scripts.fuzz_store import fuzz
from scripts.lib.store_smuggling import attack, smuggled

VOCAB = 500


def opened(folder: Path, **options) -> Datastore:
    options = {"vocab_size": VOCAB, "tokenizer_fingerprint": "t", "live_interval": 0.0, **options}
    return Datastore.open(folder, **options)


def test_no_record_inside_an_output_is_taken() -> None:
    points, taken = smuggled(every=23)
    assert points > 100
    assert taken == 0


def test_the_attack_would_be_taken_by_a_search_without_a_key(tmp_path: Path) -> None:
    """Else the test above would show nothing: the records are whole where a log has no key."""
    output = attack().astype(np.uint16).tobytes()
    at = output.find((0x4C4F4752).to_bytes(4, "little"))
    size, checksum = (int.from_bytes(output[at + k : at + k + 4], "little") for k in (4, 8))
    assert zlib.crc32(output[at + 12 : at + 12 + size]) == checksum


def test_each_byte_of_a_record_counts(tmp_path: Path) -> None:
    """Its offset and the log's key too: a record moved or copied to another log is none."""
    path = tmp_path / "log"
    key, header = new_header(VOCAB, "t")
    document = Document(np.arange(3, dtype=np.int32), 7, document_digest("r"))
    payload = document_payload("n", document, np.uint16)
    record = framed(key, len(header), payload)

    def found(log: bytes) -> int:
        path.write_bytes(log)
        return len(read_log(str(path), VOCAB, "t").documents)

    assert found(header + record) == 1
    for at in range(len(record)):
        changed = bytearray(record)
        changed[at] ^= 1
        assert found(header + bytes(changed)) == 0, at
    assert found(header + bytes(16) + record) == 0
    foreign = framed(key[:4] + bytes(12), len(header), payload)  # the marker is right
    assert found(header + foreign) == 0


def test_damaged_folders_are_refused_or_serve_what_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (datastores.durable, datastores.merging):
        monkeypatch.setattr(module, "FoldWorker", module.FoldWorker)  # put back afterwards
    counts = fuzz(seed=1, offset=0, rounds=42)
    assert counts["rounds"] == 42
    assert counts["refused"] > 0
    assert counts["uncaught"] == counts["wrong_data_accepted"] == 0


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> threading.Event:
    """A function of os fails with an error until the event is set."""
    real, healthy = getattr(os, name), threading.Event()

    def fail(*args, **kwargs):
        if not healthy.is_set():
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, fail)
    return healthy


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
@pytest.mark.parametrize("call", ["fdatasync", "fsync", "unlink", "replace"])
def test_background_work_survives_every_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    with opened(tmp_path / "d") as store:
        store.add([1, 2, 3], namespace="a")
        store.add([4, 5, 6], namespace="b")
        if call != "fdatasync":
            store.fold(60)
        healthy = failing(monkeypatch, call, code)
        if call == "fdatasync":  # the log is written anew from memory
            assert store.delete_namespace("a") == 3
        else:
            with pytest.raises(DeletionPending, match=r"not from all files yet: .*delete again"):
                store.delete_namespace("a")
            info = store.info()
            assert info.pending_deletions == 1
            assert info.background_failures >= 1
            assert info.background_error
        assert store.namespaces() == {"b": 3}
        healthy.set()
        assert store.delete_namespace("a") == 0  # waits for the one before
        store.fold(60)
        assert store.info().pending_deletions == 0
        assert store.info().background_error is None
    with opened(tmp_path / "d") as store:
        assert store.namespaces() == {"b": 3}
    assert verify_folder(tmp_path / "d") == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), ValueError("NUL"), KeyError()])
def test_the_fold_thread_survives_what_nobody_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with opened(tmp_path / "d") as store:
        store.add([1, 2, 3])
        folder = store._folder

        def fail() -> str:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(folder, "new_file_name", fail)
            with pytest.raises(DatastoreError):
                store.fold(20)
        store.fold(20)
        assert store.info().unfolded_tokens == 0


def test_a_log_that_the_disk_did_not_confirm_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read back from a file whose pages may be lost."""
    with opened(tmp_path / "d") as store:
        store.add([1, 2, 3], namespace="a", name="r")
        logs = store._served._logs  # type: ignore[attr-defined]
        path = logs.path(logs.current)
        healthy = failing(monkeypatch, "fdatasync", errno.EIO)
        logs.rotate()
        healthy.set()
        Path(path).write_bytes(b"")  # as if the pages had never reached the disk
        store.fold(60)
        assert store.namespaces() == {"a": 3}


def test_a_deletion_that_takes_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "d") as store:
        store.add([1, 2, 3])
        store.fold(60)
        free = threading.Event()
        run = store._served._worker.run  # type: ignore[attr-defined]
        monkeypatch.setattr(store._served._worker, "run", lambda job: free.wait(60) and run(job))
        with pytest.raises(DeletionPending, match=r"more than 0.05 s"):
            store._served.delete("default", None, timeout=0.05)  # type: ignore[call-arg]
        free.set()
        store.delete_namespace("default")


def test_a_manifest_cannot_name_a_file_outside(tmp_path: Path) -> None:
    folder, outside = tmp_path / "d", tmp_path / "precious.txt"
    outside.write_text("precious")
    opened(folder).close()
    content = json.loads((folder / "MANIFEST").read_text())["manifest"]
    content["files"] = [{"name": "../precious.txt", "tokens": 1, "corpus": None}]
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (folder / "MANIFEST").write_text(json.dumps({"crc32": checksum, "manifest": content}))
    with pytest.raises(DatastoreError, match=r"must be named sub-NUMBER-HEX.idx"):
        opened(folder)
    assert outside.read_text() == "precious"


@pytest.mark.parametrize("name", ["LOCK", "MANIFEST", "log-00000009.wal"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_are_refused(tmp_path: Path, name: str, link) -> None:
    folder, outside = tmp_path / "d", tmp_path / "precious.txt"
    outside.write_text("precious" * 10)
    opened(folder).close()
    (folder / name).unlink(missing_ok=True)
    link(outside, folder / name)
    if name.startswith("log") and link is os.link:
        opened(folder).close()  # a log without a header: passed over, never written to
    else:
        with pytest.raises(DatastoreError, match=name):
            opened(folder)
    assert outside.read_text() == "precious" * 10


def test_a_folder_that_everybody_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "d").close()
    (tmp_path / "d").chmod(0o777)
    with pytest.raises(DatastoreError, match=f"every user.*{ANY_OWNER}=1"):
        opened(tmp_path / "d")
    monkeypatch.setenv(ANY_OWNER, "1")
    opened(tmp_path / "d").close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "d").close()
    os.chown(tmp_path / "d", 12345, 12345)
    with pytest.raises(DatastoreError, match="belongs to user 12345"):
        opened(tmp_path / "d")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", "x" * 513])
def test_names_that_no_file_can_hold_are_refused(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / "d") as store, pytest.raises(DatastoreError, match="namespace must be"):
        store.add([1, 2], namespace=name)


def test_any_request_id_can_be_deleted(tmp_path: Path) -> None:
    with opened(tmp_path / "d") as store:
        for name in ("x" * 600, "\ud800"):
            store.add([1, 2], name=name)
            assert store.delete_document(name) == 2


def test_a_namespace_costs_little_in_files_and_counts(tmp_path: Path) -> None:
    for limit, kept in ((20_000, 200), (10_000, 0)):  # 200 * (3 + 64) tokens
        with opened(tmp_path / str(limit), max_tokens=limit) as store:
            for k in range(200):
                store.add([1, 2, 3], namespace=f"n{k}")
            store.fold(60)
            assert store.info().disk_bytes < 200 * 1000
            assert len(store.namespaces()) == kept


def test_a_log_of_version_1_is_read(tmp_path: Path) -> None:
    from scripts.lib.store_smuggling import FINGERPRINT, _log_v1
    from scripts.lib.store_smuggling import VOCAB as vocab

    path = tmp_path / "log-00000001.wal"
    path.write_bytes(_log_v1())
    content = read_log(str(path), vocab, FINGERPRINT)
    assert [d.number for _, d in content.documents] == [0, 1, 2, 3, 4]
    assert content.damaged_bytes == 0
