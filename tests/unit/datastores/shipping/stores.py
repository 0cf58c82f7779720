"""Small datastores, what they draft, and a remote file system that fails on demand."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

from datastores import Datastore
from tests.unit.datastores.drafting import drafted

VOCAB = 500


def opened(folder: Path, **options: Any) -> Datastore:
    options = {"vocab_size": VOCAB, "tokenizer_fingerprint": "t", "live_interval": 0.0, **options}
    return Datastore.open(folder, **options)


def drafts_of(folder: Path, query: list[int], namespace: str = "default") -> set[int]:
    with opened(folder, create=False, read_only=True) as store:
        assert not store.info().problems
        return drafted(store, query, namespace)


def raw_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def holds(data: bytes, tokens: np.ndarray) -> bool:
    return tokens.astype(np.uint16).tobytes() in data


def some(rng: np.random.Generator, size: int = 40) -> np.ndarray:
    return rng.integers(0, VOCAB, size)


class FlakyFileSystem(MemoryFileSystem):
    """fsspec's own memory file system, at flaky://, whose calls a test can have fail."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fail: ClassVar[Callable[[str, str], None] | None] = None
    """Called with (call, path) before each; what it raises is what the call raises."""
    calls: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def _note(self, call: str, path: str) -> None:
        FlakyFileSystem.calls.append((call, path))
        if FlakyFileSystem.fail is not None:
            FlakyFileSystem.fail(call, path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._note("read", path)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._note("write", path)
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def _open(self, path, mode="rb", **kwargs):
        self._note("write" if "w" in mode else "read", path)
        return super()._open(path, mode=mode, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._note("list", path)
        return super().ls(path, detail=detail, **kwargs)


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


def contents(address: str) -> dict[str, bytes]:
    """The files of a memory:// or flaky:// folder."""
    fs, root = fsspec.core.url_to_fs(address)
    names = fs.find(root) if fs.exists(root) else []
    return {name.rpartition("/")[2]: MemoryFileSystem.cat_file(fs, name) for name in names}


class Hang:
    """Makes calls wait until a test lets them go."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def __call__(self, call: str, path: str) -> None:
        self.free.wait(30)
        time.sleep(0)
