"""A file or folder that a long run writes to, which no second run may write to meanwhile."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Keep other runs from a folder, which is made if it is not there; left empty, it is removed.

    Raises:
        BlockDrafterError: one is at work on it, or it cannot be made.
    """
    with _held(folder, folder, os.O_RDONLY):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


@contextlib.contextmanager
def held_file(path: Path) -> Iterator[None]:
    """Keep other runs from a file, which is made if it is not there; left empty, it is removed.

    Raises:
        BlockDrafterError: one is at work on it, or it cannot be made.
    """
    with _held(path, path.parent, os.O_RDWR | os.O_CREAT):
        try:
            yield
        finally:
            if path.is_file() and not path.stat().st_size:
                path.unlink()


@contextlib.contextmanager
def _held(path: Path, folder: Path, flags: int) -> Iterator[None]:
    """With a lock on a path that is opened so, which the system lets go of however we end.

    Args:
        folder: made if it is not there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise BlockDrafterError(f"cannot use {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockDrafterError(
                f"another run is writing to {path}: end it first, or give another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)
