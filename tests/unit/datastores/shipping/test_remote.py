"""Blocks of a file at an address."""

import threading

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datastores.shipping.remote import RemoteFolder

SPANS = [(0, 2), (2, 4), (4, 6)]


def test_a_block_comes_while_the_one_before_is_used_and_no_two_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote = RemoteFolder("memory://ahead")
    remote.write("f", b"aabbcc")
    cat = MemoryFileSystem.cat_file
    begun = {start: threading.Event() for start, _ in SPANS}
    reading, most = [0], [0]

    def watched(self, path, start=None, end=None, **kwargs):
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        begun[start].set()
        data = cat(self, path, start=start, end=end, **kwargs)
        reading[0] -= 1
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", watched)
    blocks = remote.blocks("f", SPANS)
    assert next(blocks) == b"aa"
    assert begun[2].wait(10), "the second block waits for its caller"
    assert not begun[4].is_set()
    assert list(blocks) == [b"bb", b"cc"] and most == [1]


def test_a_block_that_fails_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteFolder("memory://again")
    remote.write("f", b"aabbcc")
    cat, failed = MemoryFileSystem.cat_file, []

    def once(self, path, start=None, end=None, **kwargs):
        if start == 2 and not failed:
            failed.append(start)
            raise ConnectionResetError("gone")
        return cat(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", once)
    assert list(remote.blocks("f", SPANS)) == [b"aa", b"bb", b"cc"] and failed
