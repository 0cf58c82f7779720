"""Files that are there whole or not at all, and the lock of a folder."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from .config import DatastoreError, DatastoreInUse

TEMPORARY_PREFIX = ".tmp-"


@contextlib.contextmanager
def replace_file(path: str) -> Iterator[BinaryIO]:
    """A file to write that takes its name, synced, when the block ends without an error.

    Raises DatastoreError, with the file that had the name untouched, if it cannot be written.
    """
    folder, name = os.path.split(os.path.abspath(path))
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX + name + ".", dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        sync_folder(folder)
    except OSError as error:
        raise DatastoreError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def remove_file(path: str) -> None:
    """Unlinks a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_temporaries(folder: str, name: str = "") -> None:
    """Unlinks what a killed writer left half-written, of files whose names begin with `name`."""
    for found in os.listdir(folder):
        if found.startswith(TEMPORARY_PREFIX + name):
            remove_file(os.path.join(folder, found))


def sync_folder(folder: str) -> None:
    """Returns when the names in a folder are on the disk itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderLock:
    """The right to write to a folder: one process at a time; a kill releases it."""

    def __init__(self, folder: str) -> None:
        """DatastoreInUse if another process (or another object of this one) has it."""
        path = os.path.join(folder, "LOCK")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise DatastoreError(
                f"cannot write to datastore {folder}: {error.strerror or error}"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise DatastoreInUse(
                f"datastore {folder} is in use by process {holder}: stop it first, or use its "
                "HTTP routes"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self._file)
