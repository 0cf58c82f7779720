"""Copies of folders that another process, or another object of this one, writes to."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from datastores import DatastoreError, DeletionPending, verify_folder
from datastores.shipping import Card, read_card, snapshot_folder, snapshots, write_card
from datastores.shipping.cut import Cut
from tests.eventually import eventually
from tests.unit.datastores.drafting import drafted
from tests.unit.datastores.shipping.stores import (
    drafts_of,
    holds,
    opened,
    raw_bytes,
    some,
)


def test_a_running_datastore_is_copied_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    with opened(tmp_path / "d", fold_interval=1000) as store:
        store.add_corpus("c", [[1, 50]])
        store.add_corpus("mine", [[1, 60]], "a")
        store.add([1, 100], "a")
        store.fold()
        store.add([1, 101], "a")  # in the log only
        write_card(str(tmp_path / "d"), Card("m", "mit"))
        copied = snapshot_folder(tmp_path / "d", tmp_path / "copy")
        store.add([1, 102], "a")
    assert copied.tokens == 8 and copied.rounds == 1 and copied.problems == ()
    assert verify_folder(tmp_path / "copy") == []
    assert drafts_of(tmp_path / "copy", [1], "a") == {50, 60, 100, 101}
    assert drafts_of(tmp_path / "copy", [1], "b") == {50}
    assert read_card(str(tmp_path / "copy")) == Card("m", "mit")
    assert not (tmp_path / "copy.partial").exists()
    with opened(tmp_path / "copy") as store:  # and it can be gone on with
        store.add([1, 103], "a")
        store.fold()
    assert drafts_of(tmp_path / "copy", [1], "a") == {50, 60, 100, 101, 103}


def test_what_was_deleted_before_is_in_no_byte_of_the_copy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gone, kept = some(rng), some(rng)
    with opened(tmp_path / "d", fold_interval=1000) as store:
        store.add(gone, "gone")
        store.add(kept, "kept")
        store.delete_namespace("gone")
        snapshot_folder(tmp_path / "d", tmp_path / "copy")
    data = raw_bytes(tmp_path / "copy")
    assert holds(data, kept) and not holds(data, gone) and b"gone" not in data


def test_a_deletion_that_files_have_not_followed_is_followed_by_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    gone, kept = some(rng), some(rng)
    with opened(tmp_path / "d", fold_interval=1000) as store:
        store.add(gone, "gone")
        store.add(kept, "kept")
        store.fold()
        monkeypatch.setattr(type(store._served), "_purge", lambda *_: None)
        with pytest.raises(DeletionPending):
            store._served.delete("gone", None, 0.01)
        assert holds(raw_bytes(tmp_path / "d"), gone)
        snapshot_folder(tmp_path / "d", tmp_path / "copy")
        data = raw_bytes(tmp_path / "copy")
        assert holds(data, kept) and not holds(data, gone)


@pytest.mark.parametrize("when", ["copied", "verified", "named"])
@pytest.mark.parametrize("what", ["folded", "logged", "corpus", "request"])
def test_a_tenant_deleted_meanwhile_is_not_in_the_copy(
    when: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    gone, kept = some(rng), some(rng)
    with opened(tmp_path / "d", fold_interval=1000) as store:
        store.add(kept, "kept", name="k")
        if what == "corpus":
            store.add_corpus("of gone", [gone], "gone")
        else:
            store.add(gone, "kept" if what == "request" else "gone", name="r")
        if what in ("folded", "request"):
            store.fold()

        def delete() -> None:
            if what == "request":
                assert store.delete_document("r") == gone.size
            else:
                assert store.delete_namespace("gone") == gone.size

        delete_when(monkeypatch, when, delete)
        copied = snapshot_folder(tmp_path / "d", tmp_path / "copy")
        assert copied.rounds == 2 and copied.tokens == kept.size
        data = raw_bytes(tmp_path)
        assert holds(data, kept) and not holds(data, gone)
        assert verify_folder(tmp_path / "copy") == []


def delete_when(monkeypatch: pytest.MonkeyPatch, when: str, delete) -> None:
    """Calls delete once, at a step of the first round."""
    name = {"copied": "_write_parts", "verified": "_verify", "named": "publish_folder"}[when]
    original, done = getattr(snapshots, name), []

    def step(*args):
        original(*args)
        if not done:
            done.append(True)
            delete()

    monkeypatch.setattr(snapshots, name, step)


def test_folds_and_additions_meanwhile_cost_no_second_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "d", fold_interval=1000) as store:
        store.add([1, 100], "a", name="x")
        store.add([1, 100], "a", name="y")

        def change() -> None:
            store.fold()
            store.add([1, 102], "a")
            store.fold()

        delete_when(monkeypatch, "copied", change)
        assert snapshot_folder(tmp_path / "d", tmp_path / "copy").rounds == 1
    assert drafts_of(tmp_path / "copy", [1], "a") == {100}


def test_copies_under_ingest_folds_and_deletions_hold_what_was_there(tmp_path: Path) -> None:
    over = threading.Event()
    with opened(tmp_path / "d", fold_tokens=200) as store:
        store.add(np.arange(50), "steady")

        def write() -> None:
            rng = np.random.default_rng(3)
            while not over.is_set():
                store.add(some(rng), "noise")
                if rng.random() < 0.02:
                    store.delete_namespace("noise")

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for i in range(4):
                snapshot_folder(tmp_path / "d", tmp_path / f"copy{i}")
                assert verify_folder(tmp_path / f"copy{i}") == []
                assert 31 in drafts_of(tmp_path / f"copy{i}", [28, 29, 30], "steady")
        finally:
            over.set()
            thread.join()


def test_a_killed_copy_is_gone_on_with(tmp_path: Path) -> None:
    with opened(tmp_path / "d") as store:
        for i in range(6):
            store.add_corpus(f"c{i}", [[1, 100 + i]])
    program = f"""
import os, signal
from datastores.shipping import snapshot_folder, snapshots
copied = []
write = snapshots.replace_file
def replace_file(path):
    copied.append(path)
    if len(copied) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path)
snapshots.replace_file = replace_file
snapshot_folder({str(tmp_path / "d")!r}, {str(tmp_path / "copy")!r})
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path.cwd(), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "copy").exists()
    whole = {p.name: p.stat().st_ino for p in (tmp_path / "copy.partial").glob("sub-*")}
    assert len(whole) == 3
    with opened(tmp_path / "d") as store:
        store.remove_corpus("c0")
    snapshot_folder(tmp_path / "d", tmp_path / "copy")
    after = {p.name: p.stat().st_ino for p in (tmp_path / "copy").glob("sub-*")}
    assert len(after) == 5 and len(whole.items() & after.items()) == 2
    assert drafts_of(tmp_path / "copy", [1]) == {101, 102, 103, 104, 105}


def test_a_full_disk_ends_a_copy_in_a_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "d") as store:
        store.add_corpus("c", [[1, 50]])
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: Usage(1 << 20))
        with pytest.raises(DatastoreError, match="has no room: the copy takes"):
            snapshot_folder(tmp_path / "d", tmp_path / "copy")
    with monkeypatch.context() as patch:

        def full(self, *_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield

        patch.setattr("datastores.shipping.parts.Part.blocks", full)
        with pytest.raises(DatastoreError, match="No space left on device"):
            snapshot_folder(tmp_path / "d", tmp_path / "copy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]
    snapshot_folder(tmp_path / "d", tmp_path / "copy")


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_a_damaged_file_is_left_out_and_named(tmp_path: Path) -> None:
    with opened(tmp_path / "d") as store:
        store.add_corpus("good", [[1, 50]])
        store.add_corpus("bad", [[1, 60]])
    bad = sorted((tmp_path / "d").glob("sub-*"))[1]
    bad.write_bytes(bad.read_bytes()[:-1] + b"x")
    copied = snapshot_folder(tmp_path / "d", tmp_path / "copy")
    assert len(copied.problems) == 1 and bad.name in copied.problems[0]
    assert drafts_of(tmp_path / "copy", [1]) == {50}


def test_unfinished_corpora_are_left_out(tmp_path: Path) -> None:
    from datastores import CorpusBuilder

    with CorpusBuilder(tmp_path / "d", "half", vocab_size=500, tokenizer_fingerprint="t") as made:
        made.add([1, 70])
        made.commit({})
    with opened(tmp_path / "d") as store:
        store.add_corpus("whole", [[1, 50]])
    assert snapshot_folder(tmp_path / "d", tmp_path / "copy").files == 1
    with opened(tmp_path / "copy") as store:
        assert store.info().building == () and list(store.list_corpora()) == ["whole"]


def test_a_copy_goes_to_no_place_that_is_taken(tmp_path: Path) -> None:
    with opened(tmp_path / "d") as store:
        store.add_corpus("c", [[1, 50]])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("taken", "link"):
        with pytest.raises(DatastoreError, match="exists and is no empty folder"):
            snapshot_folder(tmp_path / "d", tmp_path / name)
    with pytest.raises(DatastoreError, match="lies in the datastore"):
        snapshot_folder(tmp_path / "d", tmp_path / "d" / "copy")
    with pytest.raises(DatastoreError, match="cannot read datastore"):
        snapshot_folder(tmp_path / "nothing", tmp_path / "copy")
    (tmp_path / "copy.partial").symlink_to(tmp_path / "d")
    with pytest.raises(DatastoreError, match="must be a folder, and is not"):
        snapshot_folder(tmp_path / "d", tmp_path / "copy")
    assert drafts_of(tmp_path / "d", [1]) == {50}


def test_a_cut_sees_no_loss_in_a_merge_and_one_in_an_eviction(tmp_path: Path) -> None:
    def everything(_) -> bool:
        return True

    with opened(tmp_path / "d", max_tokens=400) as store:
        store.add(np.arange(100, 150), "a")
        store.fold()
        first = Cut(tmp_path / "d")
        store.add(np.arange(200, 250), "a")
        store.fold()
        with Cut(tmp_path / "d") as second:
            assert not second.has_lost(first, everything)
        for _ in range(6):
            store.add(np.arange(300, 350), "a")
            store.fold()
        assert store.info().evicted_tokens > 0
        with Cut(tmp_path / "d") as third:
            assert third.has_lost(first, everything)
        first.close()


def test_a_copy_of_a_fleets_folder_has_what_every_server_acknowledged(tmp_path: Path) -> None:
    gone = some(np.random.default_rng(5))
    fleet = {"shared": True, "fold_interval": 1000.0, "live_interval": 0.0}
    with opened(tmp_path / "d", **fleet) as writer, opened(tmp_path / "d", **fleet) as member:
        writer.add([1, 100], "a")
        writer.add(gone, "gone")
        member.add([1, 101], "a")
        member.add(gone, "gone")
        assert len(list((tmp_path / "d").glob("member-*.wal"))) == 1
        eventually(lambda: 101 in drafted(writer, [1], "a"), what="the writer knows the member's")
        assert writer.delete_namespace("gone") == 2 * gone.size
        snapshot_folder(tmp_path / "d", tmp_path / "copy")
    data = raw_bytes(tmp_path / "copy")
    assert drafts_of(tmp_path / "copy", [1], "a") == {100, 101}
    assert not holds(data, gone) and b"gone" not in data
    assert not list((tmp_path / "copy").glob("*.wal"))
