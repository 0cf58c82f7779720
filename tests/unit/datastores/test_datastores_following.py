"""A datastore that several processes use: one writes, others follow, and one of them takes over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from datastores import Datastore, DatastoreError
from datastores.segment import Document
from datastores.wal import Deletion, LogTail, LogWriter
from tests.eventually import eventually
from tests.unit.datastores.drafting import drafted

VOCAB = 500
# Twice what a look and sorting take; the machine may be busy.


def opened(folder: Path, **options) -> Datastore:
    given = {"vocab_size": VOCAB, "tokenizer_fingerprint": "t", "live_interval": 0.0}
    return Datastore.open(folder, shared=True, **given | options)


def test_followers_find_what_the_writer_takes_in(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path) as reader:
        assert not writer.follows and reader.follows
        assert reader.info().follows
        writer.add([1, 100], namespace="a")
        eventually(lambda: drafted(reader, [1], "a") == {100})
        assert drafted(reader, [1], "b") == set()
        # Later than the first look at that log, and after it was folded into a file.
        writer.add([1, 200], namespace="a")
        eventually(lambda: drafted(reader, [1], "a") == {100, 200})
        writer.fold(60)
        writer.add([1, 300], namespace="a")
        eventually(lambda: drafted(reader, [1], "a") == {100, 200, 300})
        writer.fold(60)
        eventually(lambda: reader.info().unfolded_tokens == 0)
        assert reader.namespaces() == {"a": 6}
        writer.add_corpus("c", [[1, 50]])
        eventually(lambda: drafted(reader, [1], "b") == {50})


def test_what_was_there_before_is_there_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.add([1, 100])
        writer.fold(60)
        writer.add([1, 200])
        with opened(tmp_path) as reader:
            assert drafted(reader, [1]) == {100, 200}


def test_a_follower_loses_nothing_for_a_moment_while_logs_are_folded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with opened(tmp_path, fold_tokens=300) as writer, opened(tmp_path) as reader:
        writer.add([1, 100])
        eventually(lambda: drafted(reader, [1]) == {100})
        for _ in range(60):
            writer.add(rng.integers(2, VOCAB, 50))
            assert 100 in drafted(reader, [1])
            time.sleep(0.02)
        writer.fold(60)
        writer.flush()
        eventually(lambda: reader.num_tokens == writer.num_tokens)


def test_followers_forget_what_the_writer_deletes(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path) as reader:
        writer.add([1, 100], name="old")
        writer.add([1, 150], name="kept")
        writer.fold(60)
        writer.add([1, 200], name="new")
        eventually(lambda: drafted(reader, [1]) == {100, 150, 200})
        writer.delete_document("new")
        writer.delete_document("old")
        eventually(lambda: drafted(reader, [1]) == {150})
        writer.add([1, 250], name="new")
        eventually(lambda: drafted(reader, [1]) == {150, 250})


def test_a_member_leaves_folding_and_corpora_to_the_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path) as reader:
        writer.add([1, 100], name="r")
        for call in (lambda: reader.fold(1), lambda: reader.add_corpus("c", [[1, 2]])):
            with pytest.raises(DatastoreError):
                call()
        reader.flush(10)
        assert drafted(reader, [1]) == {100}


def test_a_follower_takes_over_when_the_writer_ends(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    with opened(tmp_path) as second:
        writer.add([1, 100])
        writer.close()
        eventually(lambda: not second.follows)
        assert drafted(second, [1]) == {100}
        second.add([1, 200])
        second.flush()
        assert drafted(second, [1]) == {100, 200}
        with opened(tmp_path) as third:
            assert third.follows
            assert drafted(third, [1]) == {100, 200}


WRITER = """
import sys
from datastores import Datastore
store = Datastore.open(sys.argv[1], vocab_size=500, tokenizer_fingerprint="t", shared=True)
store.add([1, 100])
print("added", flush=True)
sys.stdin.read()
"""


def test_a_killed_writer_is_replaced_and_loses_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "added\n"
    with opened(tmp_path) as reader:
        assert reader.follows
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        eventually(lambda: not reader.follows)
        assert drafted(reader, [1]) == {100}


def test_another_tokenizers_folder_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(DatastoreError, match="tokenizer"):
        opened(tmp_path, tokenizer_fingerprint="other")


def test_without_sharing_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(DatastoreError, match="in use"):
        Datastore.open(tmp_path, vocab_size=VOCAB, tokenizer_fingerprint="t")


def document(number: int, *tokens: int) -> Document:
    return Document(np.array(tokens, np.int32), number)


def test_a_tail_reads_each_record_once_and_waits_for_whole_ones(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    tail = LogTail(path, VOCAB, "t")
    with pytest.raises(FileNotFoundError):
        tail.read()
    log = LogWriter(path, VOCAB, "t")
    assert tail.read().documents == []
    log.append("a", document(0, 1, 2))
    log.append_deletion(Deletion(1, "a"))
    found = tail.read()
    assert [(name, d.tokens.tolist()) for name, d in found.documents] == [("a", [1, 2])]
    assert found.deletions == [Deletion(1, "a")]
    assert tail.read().documents == []
    log.append("b", document(2, 3))
    whole = Path(path).read_bytes()
    log.append("b", document(3, 4))
    after = Path(path).read_bytes()
    # As if the last record were still being written.
    torn = tmp_path / "torn"
    torn.write_bytes(after[: len(whole) + 5])
    tail.path = str(torn)
    assert [d.number for _, d in tail.read().documents] == [2]
    torn.write_bytes(after)
    assert [d.number for _, d in tail.read().documents] == [3]
    log.close()


def test_a_tail_passes_over_damage(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogWriter(str(path), VOCAB, "t")
    sizes = []
    for number in range(3):
        log.append("a", document(number, number, number))
        sizes.append(log.size)
    log.close()
    data = bytearray(path.read_bytes())
    data[sizes[0] + 20] ^= 0xFF
    path.write_bytes(data)
    tail = LogTail(str(path), VOCAB, "t")
    assert [d.number for _, d in tail.read().documents] == [0, 2]
    assert tail.read().documents == []


def test_a_tail_refuses_another_datastores_log(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    LogWriter(path, VOCAB, "other").close()
    with pytest.raises(DatastoreError, match="another tokenizer"):
        LogTail(path, VOCAB, "t").read()
