"""A fleet: every process of a shared folder takes outputs in, one folds, any may be killed."""

import json
import os
import random
import signal
import socket
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
    DeletionPending,
    verify_folder,
)
from datastores.log_names import LogName, log_name
from datastores.manifest import read_manifest
from datastores.wal import LogWriter
from tests.eventually import eventually
from tests.unit.datastores.drafting import drafted

VOCAB = 500


def opened(folder: Path, **options) -> Datastore:
    given = {"vocab_size": VOCAB, "tokenizer_fingerprint": "t", "live_interval": 0.0}
    return Datastore.open(folder, **{"shared": True, **given, **options})


def member_logs(folder: Path) -> list[LogName]:
    names = map(log_name, os.listdir(folder))
    return [name for name in names if name is not None and name.member is not None]


def holds(folder: Path, tokens: np.ndarray) -> bool:
    found = b""
    for path in folder.iterdir():
        try:
            found += path.read_bytes()
        except FileNotFoundError:  # folded or replaced while we look
            continue
    return tokens.astype(np.uint16).tobytes() in found


def marker(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, 30)


SERVER = """
import json, sys
from datastores import Datastore, DatastoreError
store = Datastore.open(sys.argv[1], vocab_size=500, tokenizer_fingerprint="t", shared=True,
                       live_interval=0.0, fold_tokens=int(sys.argv[2]))
print(json.dumps(store.role), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    try:
        answer = getattr(store, call["method"])(*call["given"])
    except DatastoreError as error:
        answer = type(error).__name__
    print(json.dumps(answer), flush=True)
"""


class Server:
    """A process with the folder open, which does what it is asked to."""

    def __init__(self, folder: Path, fold_tokens: int = 1 << 20) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder), str(fold_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.role = self.answer()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, method: str, *given: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"method": method, "given": given}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def call(self, method: str, *given: object) -> object:
        self.ask(method, *given)
        return self.answer()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def test_what_any_server_takes_in_is_a_draft_on_all(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second, opened(tmp_path) as third:
        servers = (first, second, third)
        assert [store.role for store in servers] == ["writer", "member", "member"]
        for i, store in enumerate(servers):
            assert store.add([1, 100 + i], namespace="a")
        for store in servers:
            eventually(lambda store=store: drafted(store, [1], "a") == {100, 101, 102})
            assert drafted(store, [1], "b") == set()
            assert store.info().dropped_documents == 0


def test_the_writer_folds_the_logs_of_members_and_nothing_is_missing_meanwhile(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    with opened(tmp_path) as writer, opened(tmp_path, fold_tokens=500) as member:
        member.add([1, 100])
        for store in (writer, member):
            eventually(lambda store=store: drafted(store, [1]) == {100})
        for _ in range(25):
            member.add(rng.integers(2, VOCAB, 50))
            assert 100 in drafted(member, [1])
            assert 100 in drafted(writer, [1])
            time.sleep(0.02)
        eventually(lambda: writer.info().folded_logs > 0)
        eventually(lambda: member.info().unfolded_tokens < 500)
        member.flush()
        writer.flush()
        assert member.num_tokens == writer.num_tokens == 25 * 50 + 2
        assert len(member_logs(tmp_path)) <= 2
    assert verify_folder(tmp_path) == []


def test_an_old_log_of_a_member_is_folded(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path, fold_interval=0.5) as member:
        member.add([1, 100])
        eventually(lambda: writer.info().folded_logs == 1)
        eventually(lambda: member.info().unfolded_tokens == 0)
        assert drafted(member, [1]) == drafted(writer, [1]) == {100}


def test_a_dead_members_log_is_folded_by_the_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, Server(tmp_path) as server:
        assert server.call("add", [1, 100]) is True
        eventually(lambda: drafted(writer, [1]) == {100})
        assert len(member_logs(tmp_path)) == 1
        server.kill()
        eventually(lambda: member_logs(tmp_path) == [])
        assert drafted(writer, [1]) == {100}
        # Whoever is gone is named no more.
        writer.add([1, 200])
        writer.fold(60)
        manifest = read_manifest(str(tmp_path))
        assert manifest is not None and manifest.members == {}


def test_others_take_in_while_the_writer_stands_still_and_when_it_is_killed(
    tmp_path: Path,
) -> None:
    with Server(tmp_path) as server, opened(tmp_path) as second, opened(tmp_path) as third:
        assert server.role == "writer"
        assert server.call("add", [1, 100]) is True
        server.signal(signal.SIGSTOP)
        assert second.add([1, 101])
        assert third.add([1, 102])
        for store in (second, third):
            eventually(lambda store=store: drafted(store, [1]) == {100, 101, 102})
        assert (second.role, third.role) == ("member", "member")
        server.kill()
        eventually(lambda: sorted((second.role, third.role)) == ["member", "writer"])
        assert second.info().elections + third.info().elections == 1
        assert second.add([1, 103])
        assert third.add([1, 104])
        for store in (second, third):
            eventually(lambda store=store: drafted(store, [1]) == {100, 101, 102, 103, 104})


def test_whoever_takes_over_drops_nothing_that_comes_meanwhile(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    with opened(tmp_path) as member:
        added, ending = [], threading.Event()

        def add() -> None:
            while not ending.is_set():
                number = len(added)
                added.append(member.add([number % 100, 100 + number // 100], name=f"r{number}"))
                time.sleep(0.001)

        thread = threading.Thread(target=add)
        thread.start()
        eventually(lambda: len(added) > 50)
        writer.close()
        eventually(lambda: member.role == "writer")
        count = len(added)
        eventually(lambda: len(added) > count + 50)
        ending.set()
        thread.join()
        assert all(added)
        eventually(lambda: member.num_tokens == 2 * len(added))
    with opened(tmp_path, shared=False) as store:
        assert store.info().num_documents == len(added)


@pytest.mark.parametrize("asked", ["writer", "member"])
@pytest.mark.parametrize("of", ["namespace", "request"])
def test_a_deletion_leaves_no_byte_whichever_server_it_reaches(
    tmp_path: Path, asked: str, of: str
) -> None:
    with opened(tmp_path) as writer, opened(tmp_path) as member, Server(tmp_path) as other:
        folded = writer.add(marker(0), namespace="a", name="r")
        writer.fold(60)
        folded &= writer.add(marker(1), namespace="a", name="r")
        folded &= member.add(marker(2), namespace="a", name="r")
        assert folded and other.call("add", marker(3).tolist(), "a", "r")
        with Server(tmp_path) as dead:
            assert dead.call("add", marker(4).tolist(), "a", "r")
        kept = marker(9)
        assert member.add(kept, namespace="b", name="kept")
        store = writer if asked == "writer" else member
        eventually(lambda: store.namespaces() == {"a": 150, "b": 30})
        if of == "namespace":
            assert store.delete_namespace("a") == 150
        else:
            assert store.delete_document("r") == 150
        assert [seed for seed in range(5) if holds(tmp_path, marker(seed))] == []
        assert holds(tmp_path, kept)
        for each in (writer, member):
            eventually(lambda each=each: each.namespaces() == {"b": 30})
        eventually(lambda: other.call("namespaces") == {"b": 30})
        # What comes later has nothing to do with it.
        assert member.add([1, 100], namespace="a", name="r")
        assert other.call("add", [1, 101], "a", "r")
        assert writer.add([1, 102], namespace="a", name="r")
        for each in (writer, member):
            eventually(lambda each=each: drafted(each, [1], "a") == {100, 101, 102})
    assert verify_folder(tmp_path) == []


def test_a_member_deletes_a_namespaces_corpora_too(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path) as member:
        writer.add_corpus("c", [marker(0)], namespace="a")
        writer.add_corpus("c", [marker(1)])
        eventually(lambda: len(member.list_corpora()) == 2)
        assert member.delete_namespace("a") == 30
        assert writer.list_corpora() == {"c": 30}
        assert not holds(tmp_path, marker(0)) and holds(tmp_path, marker(1))


def test_a_deletion_waits_for_a_server_that_stands_still(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path) as member, Server(tmp_path) as still:
        assert still.call("add", marker(0).tolist(), "a", "r")
        eventually(lambda: member.namespaces() == {"a": 30})
        still.signal(signal.SIGSTOP)
        with pytest.raises(DeletionPending, match="not from all files"):
            member._served.delete("a", None, timeout=1.0)  # type: ignore[call-arg]
        assert member.namespaces() == {}
        eventually(lambda: writer.namespaces() == {})
        assert writer.info().pending_deletions == 1
        # Others' logs are folded all the same.
        assert writer.add([1, 100], namespace="b")
        writer.fold(60)
        assert holds(tmp_path, marker(0))
        still.signal(signal.SIGCONT)
        eventually(lambda: not holds(tmp_path, marker(0)))
        eventually(lambda: writer.info().pending_deletions == 0)
        assert still.call("namespaces") == {"b": 2}


def test_a_deletion_outlives_whoever_was_asked_and_the_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as last:
        pass  # the folder is made
    with Server(tmp_path) as writer, Server(tmp_path) as asked, opened(tmp_path) as last:
        assert (writer.role, asked.role) == ("writer", "member")
        for seed, server in enumerate((writer, asked)):
            assert server.call("add", marker(seed).tolist(), "a", "r")
        assert last.add(marker(2), namespace="a", name="r")
        eventually(lambda: last.namespaces() == {"a": 90})
        writer.signal(signal.SIGSTOP)
        asked.ask("delete_namespace", "a")
        eventually(lambda: last.namespaces() == {})
        asked.kill()
        writer.kill()
        eventually(lambda: last.role == "writer")
        eventually(lambda: not any(holds(tmp_path, marker(seed)) for seed in range(3)))
        eventually(lambda: last.info().pending_deletions == 0)
        assert last.namespaces() == {}


def test_kills_at_any_moment_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    rng, acknowledged = random.Random(0), 0
    servers = [Server(tmp_path, 200) for _ in range(2)]
    try:
        for _ in range(6):
            deadline = time.monotonic() + rng.uniform(0.05, 0.6)
            while time.monotonic() < deadline:
                server = servers[acknowledged % 2]
                tokens = marker(1000 + acknowledged).tolist()
                assert server.call("add", tokens, "a", f"r{acknowledged}") is True
                acknowledged += 1
            victim = rng.randrange(2)
            # In the middle of another one, too.
            servers[victim].ask("add", [1, 2, 3], "b", "unanswered")
            servers[victim].kill()
            assert verify_folder(tmp_path) == []
            with opened(tmp_path, shared=False, read_only=True) as store:
                assert store.namespaces()["a"] == 30 * acknowledged
            servers[victim] = Server(tmp_path, 200)
    finally:
        for server in servers:
            server.kill()
    with opened(tmp_path, shared=False) as store:
        eventually(lambda: member_logs(tmp_path) == [])
        assert store.namespaces()["a"] == 30 * acknowledged
        for number in range(acknowledged):
            assert holds(tmp_path, marker(1000 + number))


def test_a_kill_while_a_members_log_is_folded_does_not_double_it(tmp_path: Path) -> None:
    with Server(tmp_path) as writer, Server(tmp_path) as member:
        assert member.call("add", [1, 100])
        (log,) = member_logs(tmp_path)
        content = (tmp_path / log.file).read_bytes()
        member.kill()
        eventually(lambda: member_logs(tmp_path) == [])
        writer.kill()
    # As after a kill between the manifest and the removal of what it counts out.
    (tmp_path / log.file).write_bytes(content)
    with opened(tmp_path) as store:
        assert store.num_tokens == 2
        assert member_logs(tmp_path) == []


def test_a_fleets_folder_is_read_by_one_process_alone(tmp_path: Path) -> None:
    with Server(tmp_path) as first, Server(tmp_path) as second:
        assert first.call("add", [1, 100]) and second.call("add", [1, 101])
        with opened(tmp_path, shared=False, read_only=True) as reader:
            assert drafted(reader, [1]) == {100, 101}
    with opened(tmp_path, shared=False) as store:
        assert store.role == "alone"
        assert drafted(store, [1]) == {100, 101}
        assert store.delete_namespace("default") == 4
        eventually(lambda: member_logs(tmp_path) == [])
        assert drafted(store, [1]) == set()


def test_the_format_is_an_older_programs_until_a_fleet_uses_the_folder(tmp_path: Path) -> None:
    def version() -> int:
        return json.loads((tmp_path / "MANIFEST").read_text())["manifest"]["version"]

    with opened(tmp_path, shared=False) as store:
        store.add([1, 100])
        store.fold(60)
        store.add([1, 101], name="r")
        assert version() == 2
    with opened(tmp_path) as writer, opened(tmp_path) as member:
        assert version() == 3
        assert drafted(member, [1]) == drafted(writer, [1]) == {100, 101}
        assert member.delete_document("r") == 2
        assert drafted(writer, [1]) == {100}
    with opened(tmp_path, shared=False) as store:
        assert drafted(store, [1]) == {100}


def test_a_folder_that_its_writer_does_not_share_is_followed_only(tmp_path: Path) -> None:
    with opened(tmp_path, shared=False) as writer, opened(tmp_path) as member:
        writer.add([1, 100])
        eventually(lambda: drafted(member, [1]) == {100})
        assert not member.add([1, 101])
        assert member.info().dropped_documents == 1
        with pytest.raises(DatastoreError, match="another process"):
            member.delete_namespace("default")
        assert member_logs(tmp_path) == []


def test_lock_says_which_process_of_which_host_has_it(tmp_path: Path) -> None:
    with opened(tmp_path):
        assert (tmp_path / "LOCK").read_text() == f"{os.getpid()} {socket.gethostname()}"
        where = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(DatastoreError, match=where):
            opened(tmp_path, shared=False)


def test_a_members_log_that_the_disk_did_not_confirm_is_written_anew_before_it_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, bad = LogWriter.sync, threading.Event()
    bad.set()

    def failing(writer: LogWriter) -> None:
        if bad.is_set() and "member-" in writer.path:
            raise OSError(5, "Input/output error")
        sync(writer)

    monkeypatch.setattr(LogWriter, "sync", failing)
    with opened(tmp_path) as writer, opened(tmp_path, fold_tokens=30) as member:
        before = member_logs(tmp_path)[0]
        inode = (tmp_path / before.file).stat().st_ino
        replaced: list[bool] = []
        forget = type(writer._served)._note_deletions

        def note(collection) -> None:
            if (tmp_path / before.file).exists():
                replaced.append((tmp_path / before.file).stat().st_ino != inode)
            forget(collection)

        monkeypatch.setattr(type(writer._served), "_note_deletions", note)
        member.add(marker(0), namespace="a")
        eventually(lambda: writer.info().folded_logs >= 1)
        assert replaced[-1], "it was folded as the disk had it"
        bad.clear()
        assert holds(tmp_path, marker(0))
        eventually(lambda: drafted(writer, marker(0)[:5].tolist(), "a") != set())
