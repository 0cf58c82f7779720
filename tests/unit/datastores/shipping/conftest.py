"""Empty remote file systems for each test, and waits between attempts that take no time."""

from collections.abc import Iterator

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datastores.shipping import remote
from tests.unit.datastores.shipping.stores import FlakyFileSystem


@pytest.fixture(autouse=True)
def clean_remotes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.001)
    for fs in (MemoryFileSystem, FlakyFileSystem):
        fs.store.clear()
        fs.pseudo_dirs[:] = [""]
    FlakyFileSystem.fail = None
    FlakyFileSystem.calls.clear()
    yield
    FlakyFileSystem.fail = None
