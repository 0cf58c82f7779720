"""A datastore in a folder: restarts, kills, folding, deletion, full and broken disks."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from datastores import (
    Datastore,
    DatastoreError,
    verify_folder,
)
from datastores.durable import DurableCollection
from datastores.wal import LogWriter
from tests.eventually import eventually
from tests.unit.datastores.drafting import drafted

VOCAB = 500


def opened(folder: Path, **options) -> Datastore:
    options = {"vocab_size": VOCAB, "tokenizer_fingerprint": "t", "live_interval": 0.0, **options}
    return Datastore.open(folder, **options)


def raw_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def marker(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, VOCAB, 30)


def holds(folder: Path, tokens: np.ndarray) -> bool:
    return tokens.astype(np.uint16).tobytes() in raw_bytes(folder)


def test_what_was_added_is_there_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "d") as store:
        store.add([1, 100], namespace="a", name="r1")
        store.add_corpus("c", [[1, 50]])
    with opened(tmp_path / "d") as store:
        assert drafted(store, [1], "a") == {50, 100}
        assert drafted(store, [1]) == {50}
        store.add([1, 200], namespace="a")
        store.fold(60)
        assert drafted(store, [1], "a") == {50, 100, 200}
        assert store.info().unfolded_tokens == 0
    with opened(tmp_path / "d") as store:
        assert drafted(store, [1], "a") == {50, 100, 200}
        assert store.delete_document("r1") == 2
        assert drafted(store, [1], "a") == {50, 200}
    assert verify_folder(tmp_path / "d") == []


def test_logs_fold_by_size_and_files_merge(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with opened(tmp_path / "d", fold_tokens=2000) as store:
        for i in range(200):
            store.add(rng.integers(0, VOCAB, 100), namespace="ab"[i % 2])
        store.fold(60)
        info = store.info()
        assert info.namespaces == {"a": 10_000, "b": 10_000}
        assert info.num_documents == 200
        assert len([name for name in os.listdir(tmp_path / "d") if name.startswith("sub-")]) <= 4
    assert verify_folder(tmp_path / "d") == []


def test_a_log_folds_when_it_is_old(tmp_path: Path) -> None:
    with opened(tmp_path / "d", fold_interval=0.1) as store:
        store.add([1, 2, 3])
        eventually(lambda: store.info().unfolded_tokens == 0)
        assert drafted(store, [1]) == {2, 3}


def test_the_oldest_file_goes_beyond_max_tokens(tmp_path: Path) -> None:
    with opened(tmp_path / "d", max_tokens=4000) as store:
        for i in range(12):
            store.add(np.full(400, i))
            store.fold(60)
        info = store.info()
        assert info.num_tokens <= 4000
        assert info.evicted_tokens == 4800 - info.num_tokens
        assert drafted(store, [11]) == {11}
        assert drafted(store, [0]) == set()


def test_deletions_reach_every_byte(tmp_path: Path) -> None:
    """In a merged file, in a fresh file, in the log; other documents stay."""
    rng = np.random.default_rng(1)
    texts = {(ns, k): marker(rng) for ns in "ab" for k in range(3)}
    folder = tmp_path / "d"
    with opened(folder) as store:
        for k in range(3):
            for ns in "ab":
                store.add(texts[ns, k], namespace=ns, name=f"{ns}{k}")
            if k < 2:
                store.fold(60)
        assert all(holds(folder, text) for text in texts.values())
        assert store.delete_namespace("a") == 90
        assert store.delete_document("b0") == 30
        gone = [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
        for key, text in texts.items():
            assert holds(folder, text) == (key not in gone), key
        assert store.namespaces() == {"b": 60}
        assert drafted(store, texts["b", 1][:8].tolist(), "b")
    with opened(folder) as store:
        assert store.namespaces() == {"b": 60}
    assert verify_folder(folder) == []


def test_a_deletion_reaches_logs_that_were_not_folded_when_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document is in the log of an earlier run, the deletion in the log of this one."""
    rng = np.random.default_rng(3)
    secret, other, folder = marker(rng), marker(rng), tmp_path / "d"
    with opened(folder) as store:
        store.add(secret, namespace="a", name="r")
        store.add(other, namespace="a")
    # As if the background thread had no time before the deletion came.
    monkeypatch.setattr(DurableCollection, "_has_work", lambda self: self._closed or self._purges)
    with opened(folder) as store:
        assert store.delete_document("r") == 30
        assert not holds(folder, secret) and holds(folder, other)
    with opened(folder) as store:
        assert drafted(store, secret[:8].tolist(), "a") <= set(other.tolist())
        assert store.delete_document("r") == 0


def test_a_deletion_that_was_cut_short_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after the deletion is in the log, before any file is rewritten."""
    rng = np.random.default_rng(2)
    secret, folder = marker(rng), tmp_path / "d"
    store = opened(folder)
    store.add(secret, namespace="a")
    store.fold(60)

    def fail(job):
        raise DatastoreError("no space left")

    monkeypatch.setattr(store._served._worker, "run", fail)  # type: ignore[attr-defined]
    with pytest.raises(DatastoreError, match="not from all files yet: no space left"):
        store.delete_namespace("a")
    assert drafted(store, secret[:8].tolist(), "a") == set()
    store.close()
    assert holds(folder, secret)
    with opened(folder) as store:
        assert drafted(store, secret[:8].tolist(), "a") == set()
        store.fold(60)
        assert not holds(folder, secret)


def test_a_full_disk_drops_documents_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ENOSPC in the middle of a record: what came before and what comes later is intact."""
    write = os.write
    with opened(tmp_path / "d") as store:
        store.add([1, 100])
        log = store._served._logs._writer._file  # type: ignore[attr-defined]

        def full(descriptor: int, data) -> int:
            if descriptor != log:
                return write(descriptor, data)
            if len(data) > 10:
                return write(descriptor, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        assert store.add([1, 200]) is False
        monkeypatch.undo()
        assert "No space left on device" in caplog.text
        assert store.add([1, 300]) is True
        store.flush(20)
        assert store.info().dropped_documents == 1
        assert drafted(store, [1]) == {100, 300}
    with opened(tmp_path / "d") as store:
        assert drafted(store, [1]) == {100, 300}
    assert verify_folder(tmp_path / "d") == []


def test_a_fold_that_fails_is_tried_again_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastores.durable._RETRY_SECONDS", 0.1)
    with opened(tmp_path / "d") as store:
        worker = store._served._worker  # type: ignore[attr-defined]
        run, calls = worker.run, []

        def fail_once(job):
            calls.append(job)
            if len(calls) == 1:
                raise DatastoreError("cannot write: no space left")
            return run(job)

        monkeypatch.setattr(worker, "run", fail_once)
        store.add([1, 2, 3])
        with pytest.raises(DatastoreError, match="no space left"):
            store.fold(60)
        assert drafted(store, [1]) == {2, 3}
        store.fold(60)
        assert drafted(store, [1]) == {2, 3}
        assert store.info().unfolded_tokens == 0


def test_the_folding_process_may_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastores.durable._RETRY_SECONDS", 0.1)
    with opened(tmp_path / "d") as store:
        store.add([1, 2, 3])
        store.fold(60)
        process = store._served._worker._process  # type: ignore[attr-defined]
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
        store.add([4, 5, 6])
        store.fold(60)
        assert drafted(store, [4]) == {5, 6}


def test_more_than_fits_the_queue_is_refused(tmp_path: Path, may_sort: threading.Event) -> None:
    with opened(tmp_path / "d", live_buffer_tokens=100) as store:
        taken = [store.add([1] * 40) for _ in range(4)]
        may_sort.set()
        assert taken == [True, True, False, False]
        assert store.info().dropped_documents == 2


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign", "missing"])
def test_a_damaged_file_is_left_out_and_the_others_serve(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "d"
    with opened(folder) as store:
        store.add_corpus("good", [[1, 50]])
        store.add_corpus("bad", [[1, 60]])
    with opened(folder, read_only=True) as store:
        (entry,) = [f.entry for f in store._folder.files if f.entry.corpus == "bad"]  # type: ignore[union-attr]
    path = folder / entry.name
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "missing":
        path.unlink()
    else:
        with opened(tmp_path / "other", tokenizer_fingerprint="another") as store:
            store.add_corpus("bad", [[1, 60]])
        (other,) = (tmp_path / "other").glob("sub-*")
        path.write_bytes(other.read_bytes())
    with opened(folder) as store:
        (problem,) = store.info().problems
        assert entry.name in problem
        assert drafted(store, [1]) == {50}
        store.add([1, 100])
        store.fold(60)
        assert drafted(store, [1]) == {50, 100}
    assert len(verify_folder(folder)) == 1
    with opened(folder) as store:
        store.remove_corpus("bad") if "bad" in store.list_corpora() else None
        assert drafted(store, [1]) == {50, 100}


def test_a_damaged_manifest_and_a_foreign_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with opened(folder) as store:
        store.add([1, 2])
    with pytest.raises(DatastoreError, match="built with tokenizer 't', not 'u'"):
        opened(folder, tokenizer_fingerprint="u")
    with pytest.raises(DatastoreError, match="vocabulary of 500 tokens, not 600"):
        opened(folder, vocab_size=600)
    text = (folder / "MANIFEST").read_text()
    (folder / "MANIFEST").write_text(text.replace('"next_file": 1', '"next_file": 2'))
    with pytest.raises(DatastoreError, match="MANIFEST is damaged"):
        opened(folder)


def test_one_writer_and_many_readers(tmp_path: Path) -> None:
    with opened(tmp_path / "d") as store:
        store.add([1, 100])
        store.fold(60)
        store.add([1, 200])
        with pytest.raises(DatastoreError, match=f"in use by process {os.getpid()}"):
            opened(tmp_path / "d")
        with opened(tmp_path / "d", read_only=True) as reader:
            assert drafted(reader, [1]) == {100, 200}
            with pytest.raises(DatastoreError, match="read only"):
                reader.add([1])
            with pytest.raises(DatastoreError, match="read only"):
                reader.delete_namespace("default")


def test_folders_that_are_no_datastore_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatastoreError, match="is a file"):
        opened(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("x")
    with pytest.raises(DatastoreError, match="not empty"):
        opened(tmp_path / "full")
    with pytest.raises(DatastoreError, match="there is no datastore folder"):
        opened(tmp_path / "none", create=False)
    with pytest.raises(DatastoreError, match="cannot create"):
        opened(tmp_path / "file" / "under")


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with opened(folder) as store:
        store.add([1, 2])
        store.fold(60)
    names = ["sub-00000099-aaaaaaaa.idx", ".tmp-sub-1", "log-00000000.wal"]
    for name in names:
        (folder / name).write_bytes(b"left over")
    with opened(folder) as store:
        assert not set(names) & set(os.listdir(folder))
        assert drafted(store, [1]) == {2}


def test_every_kind_of_torn_log_is_read(tmp_path: Path) -> None:
    """A log cut at each byte yields the records that are whole; damage costs one record."""
    path = str(tmp_path / "log")
    from datastores.segment import Document
    from datastores.wal import read_log

    writer = LogWriter(path, VOCAB, "t")
    ends = [writer.size]
    for k in range(3):
        writer.append("a", Document(np.arange(k + 1, dtype=np.int32), k))
        ends.append(writer.size)
    writer.close()
    whole = Path(path).read_bytes()
    for cut in range(len(whole) + 1):
        Path(path).write_bytes(whole[:cut])
        content = read_log(path, VOCAB, "t")
        assert len(content.documents) == max(sum(end <= cut for end in ends) - 1, 0)
        assert content.torn_only
    for at in range(ends[1], ends[2]):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        Path(path).write_bytes(damaged)
        content = read_log(path, VOCAB, "t")
        assert [d.number for _, d in content.documents] == [0, 2]
        assert content.damaged_bytes == ends[2] - ends[1]
        assert not content.torn_only


def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    """kill -9 in the middle of adding, folding and merging (scripts/crash_test.py does many)."""
    program = (
        "import sys; from datastores import Datastore\n"
        "s = Datastore.open(sys.argv[1], vocab_size=500, fold_tokens=500)\n"
        "k = int(sys.argv[2])\n"
        "while True:\n"
        "    s.add([7, k % 400, (k * 7) % 400], name=str(k)); print(k, flush=True); k += 1\n"
    )
    acknowledged = 0
    for delay in (0.05, 0.3, 1.0):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "d"), str(acknowledged)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.kill()
        lines = [line for line in process.stdout.read().splitlines(True) if line.endswith("\n")]
        acknowledged = int(lines[-1]) + 1 if lines else acknowledged + 1
        process.wait()
        with Datastore.open(tmp_path / "d") as store:
            info = store.info()
            # One more may have been logged when the kill came before it was acknowledged.
            assert info.num_documents in (acknowledged, acknowledged + 1)
            assert info.problems == ()
            acknowledged = info.num_documents
    assert verify_folder(tmp_path / "d") == []
