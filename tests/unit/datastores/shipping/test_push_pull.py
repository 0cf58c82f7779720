"""Datastores to addresses and back: resumed, checked, refused; remotes that fail or lie."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datastores import Datastore, DatastoreError, verify_folder
from datastores.shipping import Card, pull, push, read_card, write_card
from datastores.shipping.shipment import NAME
from tests.unit.datastores.shipping.stores import (
    FlakyFileSystem,
    Hang,
    contents,
    drafts_of,
    holds,
    opened,
    raw_bytes,
    some,
)

SMALL = {"block_bytes": 1 << 10, "piece_bytes": 1 << 12}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A datastore with a shared corpus, a bound one, and served outputs, one of them in a log."""
    folder = tmp_path / "store"
    with opened(folder, fold_interval=1000) as made:
        made.add_corpus("c", [[1, 50], list(range(2, 402)) * 10])
        made.add_corpus("mine", [[1, 60]], "acme")
        made.add([1, 100], "acme")
        made.fold()
        made.add([1, 101], "acme")
    return folder


def address(kind: str, tmp_path: Path) -> str:
    return {"file": f"file://{tmp_path}/remote", "memory": "memory://remote/a"}[kind]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_what_is_pushed_and_pulled_drafts_the_same(kind: str, store: Path, tmp_path: Path) -> None:
    write_card(str(store), Card("m", "mit", "All of it.", {"c": ("c.txt",)}))
    pushed = push(store, address(kind, tmp_path), served=True, **SMALL)
    pulled = pull(address(kind, tmp_path), tmp_path / "here", tokenizer_fingerprint="t")
    assert pulled.tokens == pushed.tokens == 4008 and pulled.received == pulled.nbytes
    assert pushed.sent == pushed.nbytes == pulled.nbytes
    assert verify_folder(tmp_path / "here") == []
    for namespace in ("acme", "other"):
        assert drafts_of(tmp_path / "here", [1], namespace) == drafts_of(store, [1], namespace)
    assert read_card(str(tmp_path / "here")) == read_card(str(store))
    with opened(tmp_path / "here") as again:  # what comes later can be deleted as ever
        again.add([1, 102], "acme", name="r")
        assert again.delete_document("r") == 2
    card = (tmp_path / "here" / "README.md").read_text()
    for said in ('license: "mit"', "| m |", "c.txt", "4,008 tokens", "of 1 namespaces"):
        assert said in card
    assert "acme/mine" in card
    again = pull(address(kind, tmp_path), tmp_path / "here")
    assert again.received == 0


def test_corpora_only_leaves_every_byte_of_tenants_here(store: Path, tmp_path: Path) -> None:
    push(store, "memory://r", served=False)
    data = b"".join(contents("memory://r").values())
    assert b"acme" not in data
    pull("memory://r", tmp_path / "here")
    with opened(tmp_path / "here", create=False) as here:
        assert list(here.list_corpora()) == ["c"] and here.namespaces() == {}


def test_a_second_push_sends_what_is_new_and_removes_what_is_gone(
    store: Path, tmp_path: Path
) -> None:
    push(store, "memory://r", served=False, **SMALL)
    with opened(store) as made:
        made.add_corpus("d", [[2, 70]])
        made.remove_corpus("c")
        again = push(store, "memory://r", served=False, **SMALL)
        unchanged = push(store, "memory://r", served=False, **SMALL)
    assert 0 < again.sent == again.nbytes < 3000 and unchanged.sent == 0
    assert sorted(contents("memory://r"))[:2] == ["DATASTORE.json", "README.md"]
    assert len(contents("memory://r")) == 3
    pull("memory://r", tmp_path / "here")
    assert drafts_of(tmp_path / "here", [2]) == {70}


# -- another tokenizer, another place --------------------------------------------------------


def test_another_tokenizer_is_refused_before_a_byte_moves(store: Path, tmp_path: Path) -> None:
    push(store, "flaky://r", served=True)
    with Datastore.open(tmp_path / "u", vocab_size=500, tokenizer_fingerprint="u") as other:
        other.add_corpus("c", [[1, 2]])
    before = contents("flaky://r")
    FlakyFileSystem.calls.clear()
    with pytest.raises(DatastoreError, match="was built with tokenizer 't', not 'u'"):
        push(tmp_path / "u", "flaky://r", served=True)
    for wrong in ({"tokenizer_fingerprint": "u"}, {"vocab_size": 501}):
        with pytest.raises(DatastoreError, match="was built"):
            pull("flaky://r", tmp_path / "here", **wrong)
    assert contents("flaky://r") == before
    assert all(call == "read" and path.endswith(NAME) for call, path in FlakyFileSystem.calls)
    assert not (tmp_path / "here").exists() and not (tmp_path / "here.partial").exists()


def test_a_push_touches_no_folder_of_other_things(store: Path, tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "thesis.tex").write_text("x")
    with pytest.raises(DatastoreError, match=r"holds something else \('thesis.tex'\)"):
        push(store, f"file://{tmp_path}/remote", served=True)
    assert [p.name for p in (tmp_path / "remote").iterdir()] == ["thesis.tex"]


def test_a_pull_goes_to_no_folder_that_is_taken(store: Path, tmp_path: Path) -> None:
    push(store, "memory://r", served=True)
    with pytest.raises(DatastoreError, match="exists and is no empty folder"):
        pull("memory://r", store)
    (tmp_path / "empty").mkdir()
    pull("memory://r", tmp_path / "empty")
    assert verify_folder(tmp_path / "empty") == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("nonsense://x/y", "is no address"),
        ("memory://nothing", "there is no datastore at memory://nothing: it has no DATASTORE.json"),
        ("s3://bucket/x", r"need a package: pip install s3fs"),
    ],
)
def test_addresses_that_cannot_be_used_are_told_in_a_line(
    wrong: str, message: str, tmp_path: Path
) -> None:
    if wrong.startswith("s3") and shutil.which("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(DatastoreError, match=message) as told:
        pull(wrong, tmp_path / "here")
    assert "\n" not in str(told.value)


def test_messages_keep_what_may_be_a_secret(tmp_path: Path) -> None:
    with pytest.raises(DatastoreError) as told:
        pull("ftp://me:hunter2@127.0.0.1:1/x?token=abc", tmp_path / "here", timeout=5)
    assert "hunter2" not in str(told.value) and "abc" not in str(told.value)


# -- interruptions and remotes that fail -----------------------------------------------------


def test_a_killed_push_goes_on(store: Path, tmp_path: Path) -> None:
    where = address("file", tmp_path)
    program = f"""
import os, signal
from datastores.shipping import push
from fsspec.implementations.local import LocalFileOpener
written = []
write = LocalFileOpener.write
def count(self, block):
    written.append(block)
    if len(written) == 13:
        self.f.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, block)
LocalFileOpener.write = count
push({str(store)!r}, {where!r}, served=True, **{SMALL!r})
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == -signal.SIGKILL
    there = {p.name: p.stat().st_size for p in (tmp_path / "remote").iterdir()}
    assert NAME not in there and len(there) == 4
    with pytest.raises(DatastoreError, match="there is no datastore at"):
        pull(where, tmp_path / "here")
    # One of those that came whole is damaged since: it is compared by its content.
    whole = sorted(name for name, size in there.items() if size == 1 << 12)
    first = tmp_path / "remote" / whole[0]
    first.write_bytes(b"x" * (1 << 12))
    pushed = push(store, where, served=True, **SMALL)
    assert pushed.sent == pushed.nbytes - (len(whole) - 1) * (1 << 12)
    pull(where, tmp_path / "here")
    assert drafts_of(tmp_path / "here", [1]) == {50}


def test_a_killed_pull_goes_on_in_the_middle_of_a_file(store: Path, tmp_path: Path) -> None:
    where = address("file", tmp_path)
    pushed = push(store, where, served=True, **SMALL)
    program = f"""
import os, signal
import sys
from datastores.shipping import pull
module = sys.modules["datastores.shipping.pull"]
written = []
write = module._write
def count(part, block):
    written.append(block)
    if len(written) == 11:
        part.write(block[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    write(part, block)
module._write = count
pull({where!r}, {str(tmp_path / "here")!r})
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "here").exists()
    pulled = pull(where, tmp_path / "here")
    assert pulled.received == pushed.nbytes - 10 * (1 << 10)
    assert verify_folder(tmp_path / "here") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "remote", "store"]


def test_a_remote_that_fails_now_and_then_is_asked_again(store: Path, tmp_path: Path) -> None:
    count = [0]

    def fail(call: str, path: str) -> None:
        count[0] += 1
        if count[0] % 3 == 0:
            raise OSError(errno.ECONNRESET, "Connection reset by peer")

    FlakyFileSystem.fail = fail
    push(store, "flaky://r", served=True, **SMALL)
    pull("flaky://r", tmp_path / "here")
    assert count[0] > 30
    assert drafts_of(tmp_path / "here", [1], "acme") == {50, 60, 100, 101}


def test_a_remote_that_fails_for_good_is_told_and_gone_on_with(store: Path, tmp_path: Path) -> None:
    def fail(call: str, path: str) -> None:
        if call == "write" and len(contents("flaky://r")) >= 3:
            raise OSError("the bucket is\non fire")

    FlakyFileSystem.fail = fail
    with pytest.raises(DatastoreError, match=r"flaky://r: cannot write sub-.*: the bucket is on"):
        push(store, "flaky://r", served=True, **SMALL)
    FlakyFileSystem.fail = None
    pushed = push(store, "flaky://r", served=True, **SMALL)
    assert pushed.sent < pushed.nbytes

    def fail_reads(call: str, path: str) -> None:
        reads = [p for c, p in FlakyFileSystem.calls if c == "read" and not p.endswith(NAME)]
        if call == "read" and len(reads) > 8:
            raise PermissionError("no more")

    FlakyFileSystem.calls.clear()
    FlakyFileSystem.fail = fail_reads
    with pytest.raises(DatastoreError, match=r"flaky://r: cannot read sub-.*: no more"):
        pull("flaky://r", tmp_path / "here")
    FlakyFileSystem.fail = None
    pulled = pull("flaky://r", tmp_path / "here")
    assert 0 < pulled.received < pulled.nbytes


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_remote_that_does_not_answer_is_left_in_time(
    call: str, store: Path, tmp_path: Path
) -> None:
    push(store, "flaky://old", served=True)
    hang = Hang()
    FlakyFileSystem.fail = lambda made, path: hang(made, path) if made == call else None
    began = time.monotonic()
    with pytest.raises(DatastoreError, match=r"flaky://\w+ did not answer within"):
        if call == "read":
            pull("flaky://old", tmp_path / "here", timeout=0.2)
        else:
            push(store, "flaky://new", served=True, timeout=0.2)
    assert time.monotonic() - began < 10
    hang.free.set()


def test_a_full_disk_ends_a_pull_that_can_go_on(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, "memory://r", served=True, **SMALL)
    module = sys.modules["datastores.shipping.pull"]
    write, written = module._write, []

    def full(part, block):
        if len(written) == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(block)
        write(part, block)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", full)
        with pytest.raises(
            DatastoreError, match=r"No space left on device; .* the same command goe"
        ):
            pull("memory://r", tmp_path / "here")
    pulled = pull("memory://r", tmp_path / "here")
    assert pulled.received == pulled.nbytes - 9 * (1 << 10)


def test_no_pull_begins_without_room(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, "memory://r", served=True)
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DatastoreError, match="has no room: the copy takes"):
        pull("memory://r", tmp_path / "here")


# -- remotes that are damaged or lie ---------------------------------------------------------


def sub_files(fs: type[MemoryFileSystem], root: str) -> list[str]:
    return sorted(name for name in fs.store if name.startswith(root) and "/sub-" in name)


def test_a_damaged_remote_file_is_never_served(store: Path, tmp_path: Path) -> None:
    push(store, "memory://r", served=True, **SMALL)
    name = sub_files(MemoryFileSystem, "/r")[1]
    original = MemoryFileSystem.store[name].getvalue()
    MemoryFileSystem.store[name].getbuffer()[2000] ^= 1
    with pytest.raises(DatastoreError, match=f"{Path(name).name} is damaged: the checksum of its"):
        pull("memory://r", tmp_path / "here")
    assert not (tmp_path / "here").exists()
    MemoryFileSystem.store[name].truncate(1500)
    with pytest.raises(DatastoreError, match="is damaged"):
        pull("memory://r", tmp_path / "here")
    del MemoryFileSystem.store[name]
    with pytest.raises(DatastoreError, match="cannot read"):
        pull("memory://r", tmp_path / "here")
    MemoryFileSystem().pipe_file(name, original)
    pull("memory://r", tmp_path / "here")
    assert drafts_of(tmp_path / "here", [1]) == {50}


def test_a_block_that_came_wrong_once_is_asked_for_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, "memory://r", served=True, **SMALL)
    cat, lied = MemoryFileSystem.cat_file, []

    def once_wrong(self, path, start=None, end=None, **kwargs):
        data = cat(self, path, start=start, end=end, **kwargs)
        if "/sub-" in path and not lied:
            lied.append(path)
            return b"x" * len(data)
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", once_wrong)
    pull("memory://r", tmp_path / "here")
    assert lied and verify_folder(tmp_path / "here") == []


def forge(root: str, change) -> None:
    """Changes what the address says lies there, with checksums that fit."""
    fs = MemoryFileSystem()
    stored = json.loads(fs.cat_file(f"{root}/{NAME}"))
    change(stored)
    text = json.dumps(stored["content"], sort_keys=True).encode()
    stored["sha256"] = hashlib.sha256(text).hexdigest()
    fs.pipe_file(f"{root}/{NAME}", json.dumps(stored).encode())


def in_content(**fields):
    return lambda stored: stored["content"].update(fields)


def in_file(**fields):
    return lambda stored: stored["content"]["files"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_file(name="../../evil"), "must be named sub-NUMBER-HEX.idx"),
        (in_file(name="/etc/passwd"), "must be named sub-NUMBER-HEX.idx"),
        (in_file(name="sub-00000001-abcdef01.idx/../x"), "must be named sub-NUMBER-HEX.idx"),
        (in_file(name="sub-00000001-abcdef01.idx\n"), "must be named sub-NUMBER-HEX.idx"),
        (in_file(name="MANIFEST"), "must be named sub-NUMBER-HEX.idx"),
        (in_file(name="sub-9999999999999999-abcdef01.idx"), "must be named"),
        (in_file(nbytes=-1), "tokens and nbytes"),
        (in_file(nbytes=1 << 70), "tokens and nbytes"),
        (in_file(tokens="many"), "tokens and nbytes"),
        (in_file(blocks=[]), "one checksum a block"),
        (in_file(blocks=["zz"] * 30), "checksum"),
        (in_file(corpus="x" * 600), "corpus must be a name"),
        (in_content(files="all"), "files must be a list"),
        (in_content(block_bytes=0), "block_bytes must be a whole number"),
        (in_content(piece_bytes=1025), "a multiple of block_bytes"),
        (in_content(vocab_size=0), "vocab_size must be"),
        (in_content(card=[]), "must be a JSON object"),
        (in_content(more=1), "its fields are others"),
        (lambda s: s["content"]["files"].append(s["content"]["files"][0]), "named twice"),
        (lambda s: s.update(version=2), "version 2; this program reads 1; a newer sglang-ext"),
        (lambda s: s.update(version="x"), "format version x; this program reads 1$"),
        (lambda s: s.update(format="cake"), "is damaged, or no datastore's"),
    ],
)
def test_a_forged_manifest_is_refused_and_nothing_is_written(
    change, message: str, store: Path, tmp_path: Path
) -> None:
    push(store, "memory://r", served=True, **SMALL)
    before = sorted(tmp_path.rglob("*"))
    forge("/r", change)
    with pytest.raises(DatastoreError, match=message):
        pull("memory://r", tmp_path / "in" / "here")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_newer_format_is_not_overwritten(store: Path) -> None:
    push(store, "memory://r", served=True)
    forge("/r", lambda stored: stored.update(version=2))
    before = contents("memory://r")
    with pytest.raises(DatastoreError, match="a newer sglang-ext wrote it: update this one"):
        push(store, "memory://r", served=True)
    assert contents("memory://r") == before


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b'{"format": 3}', b"\xff\xfe"])
def test_a_damaged_manifest_is_told(damage: bytes, store: Path, tmp_path: Path) -> None:
    push(store, "memory://r", served=True)
    MemoryFileSystem().pipe_file(f"/r/{NAME}", damage)
    with pytest.raises(DatastoreError, match="is damaged"):
        pull("memory://r", tmp_path / "here")


def test_a_file_that_is_something_else_than_the_manifest_says_is_refused(
    store: Path, tmp_path: Path
) -> None:
    push(store, "memory://r", served=True, **SMALL)
    forge("/r", in_file(tokens=7))
    with pytest.raises(DatastoreError, match="cannot be used: it holds something else"):
        pull("memory://r", tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_nothing_is_written_through_links(store: Path, tmp_path: Path) -> None:
    where = address("file", tmp_path)
    push(store, where, served=True, **SMALL)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    content = json.loads((tmp_path / "remote" / NAME).read_text())["content"]
    name = content["files"][0]["name"]
    partial = tmp_path / "here.partial"
    partial.mkdir(mode=0o700)
    (partial / f"{name}.part").symlink_to(victim)
    (partial / content["files"][1]["name"]).symlink_to(victim)
    (partial / "MANIFEST").symlink_to(victim)
    with pytest.raises(DatastoreError, match="cannot write to"):
        pull(where, tmp_path / "here")
    (partial / f"{name}.part").unlink()
    pull(where, tmp_path / "here")
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(DatastoreError, match="exists and is no empty folder"):
        pull(where, tmp_path / "link")
    # Nor by a push, into a folder that somebody has put links into.
    piece = sorted(p for p in (tmp_path / "remote").iterdir() if "sub-" in p.name)[0]
    piece.unlink()
    piece.symlink_to(victim)
    (tmp_path / "remote" / NAME).unlink()
    push(store, where, served=True, **SMALL)
    assert victim.read_text() == "mine" and not piece.is_symlink()


# -- deletions while it goes on --------------------------------------------------------------


@pytest.mark.parametrize("when", ["sent", "named"])
@pytest.mark.parametrize("what", ["folded", "logged", "corpus"])
def test_a_tenant_deleted_while_it_is_pushed_is_not_at_the_address(
    when: str, what: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    gone, kept = some(rng), some(rng)
    with opened(tmp_path / "d", fold_interval=1000) as store:
        store.add(kept, "kept")
        if what == "corpus":
            store.add_corpus("of gone", [gone], "gone")
        else:
            store.add(gone, "gone")
        if what == "folded":
            store.fold()
        deleted = []

        def delete(call: str, path: str) -> None:
            last = f"/{NAME}" if when == "named" else "/sub-"
            if call == "write" and last in path and not deleted:
                deleted.append(store.delete_namespace("gone"))

        FlakyFileSystem.fail = delete
        # The deletion takes its time within a call, on a machine that has other things to do.
        push(store._folder.path, "flaky://r", served=True, timeout=600)
    assert deleted == [gone.size]
    data = b"".join(contents("flaky://r").values())
    assert holds(data, kept) and not holds(data, gone)
    assert not holds(raw_bytes(tmp_path), gone)
    pull("flaky://r", tmp_path / "here")
    assert verify_folder(tmp_path / "here") == []


def test_a_push_while_it_is_pulled_has_the_new_one_pulled(store: Path, tmp_path: Path) -> None:
    push(store, "flaky://r", served=True, **SMALL)
    replaced = []

    def replace(call: str, path: str) -> None:
        if call == "read" and "/sub-" in path and not replaced:
            replaced.append(path)
            with opened(store) as made:
                for corpus in list(made.list_corpora()):
                    made.remove_corpus(corpus)
                made.delete_namespace("acme")
                made.add_corpus("new", [[1, 90]])
            push(store, "flaky://r", served=True, **SMALL)

    FlakyFileSystem.fail = replace
    pull("flaky://r", tmp_path / "here")
    assert drafts_of(tmp_path / "here", [1], "acme") == {90}


def test_a_damaged_sub_index_is_not_pushed(store: Path, tmp_path: Path) -> None:
    with opened(store) as made:
        made.add_corpus("bad", [[1, 70]])
    bad = max(store.glob("sub-*"))
    bad.write_bytes(bad.read_bytes()[:-1] + b"x")
    pushed = push(store, "memory://r", served=True)
    assert len(pushed.problems) == 1 and bad.name in pushed.problems[0]
    assert bad.name not in contents("memory://r")
    pull("memory://r", tmp_path / "here")
    assert drafts_of(tmp_path / "here", [1]) == {50}


def test_nothing_is_pushed_of_an_empty_datastore(tmp_path: Path) -> None:
    with opened(tmp_path / "d") as store:
        store.add([1, 2], "a")
    with pytest.raises(DatastoreError, match="holds nothing that could be pushed"):
        push(tmp_path / "d", "memory://r", served=False)
    assert contents("memory://r") == {}


def test_the_hub_gets_a_private_dataset_by_its_short_address(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datastores.shipping.remote import RemoteFolder, full_address

    assert full_address("hf://acme/store/v1") == "hf://datasets/acme/store/v1"
    assert full_address("hf://datasets/acme/store") == "hf://datasets/acme/store"
    made = {}
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda self, name, **how: made.update(how, name=name)
    )
    RemoteFolder("hf://acme/store/v1").prepare()
    assert made == {
        "name": "acme/store",
        "repo_type": "dataset",
        "private": True,
        "exist_ok": True,
    }
