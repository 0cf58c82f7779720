"""Files that are there whole or not at all, whom they may belong to, and the lock of a folder."""

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from .config import DatastoreError, DatastoreInUse

TEMPORARY_PREFIX = ".tmp-"
# Set to 1, folders and files of other users, or that all may write to, are used all the same.
ANY_OWNER = "SGLANG_EXT_DATASTORE_ANY_OWNER"
# A process id of up to 10 digits and a host's name of up to 253 characters.
_LOCK_BYTES = 264
_CREATION_ATTEMPTS = 5


class NotSynced(DatastoreError):
    """A file has its name, but a power cut may still take it back."""


@contextlib.contextmanager
def replace_file(path: str) -> Iterator[BinaryIO]:
    """A file to write that takes its name, synced, when the block ends without an error.

    Raises DatastoreError, with the file that had the name untouched, if it cannot be written;
    NotSynced if it has been replaced, and the disk did not confirm the name.
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
        try:
            sync_folder(folder)
        except OSError as error:
            raise NotSynced(f"cannot sync {folder}: {error.strerror or error}") from None
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


def remove_if_file(path: str) -> bool:
    """Unlinks a file or link; False: it is something else, or cannot be unlinked."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def open_file(path: str) -> BinaryIO:
    """A regular file of ours to read, never through a link.

    Raises FileNotFoundError, or DatastoreError that says what is wrong with it.
    """
    # Without O_NONBLOCK, opening a pipe would wait for ever.
    return os.fdopen(_opened(path, os.O_RDONLY | os.O_NONBLOCK), "rb")


def _opened(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a link" if os.path.islink(path) else error.strerror or error
        raise DatastoreError(
            f"cannot open {path}: {reason}; a datastore's files must be plain files that this "
            "user may read"
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DatastoreError(f"{path} must be a plain file, and is not: remove it")
        check_owner(path, found)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_owner(path: str, found: os.stat_result) -> None:
    """DatastoreError if another user (but root) owns it or all users may write to it."""
    if os.environ.get(ANY_OWNER) == "1":
        return
    problem = None
    if found.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to user {found.st_uid}, not to {os.geteuid()}, who reads it"
        remedy = "chown it"
    elif found.st_mode & stat.S_IWOTH:
        problem, remedy = "can be written by every user", "chmod o-w it"
    if problem is not None:
        raise DatastoreError(
            f"{path} {problem}: {remedy}, or set {ANY_OWNER}=1 if you trust whoever wrote it"
        )


def remove_temporaries(folder: str, name: str = "") -> None:
    """Unlinks what a killed writer left half-written, of files whose names begin with `name`."""
    for found in os.listdir(folder):
        if found.startswith(TEMPORARY_PREFIX + name):
            remove_if_file(os.path.join(folder, found))


def sync_folder(folder: str) -> None:
    """Returns when the names in a folder are on the disk itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_locked(path: str) -> int:
    """A new file to append to that is locked from the moment on at which it has its name.

    The lock ends with the descriptor, so also with a kill: then is_locked() says that nobody writes
    to it any more. OSError if it cannot be made.
    """
    folder, name = os.path.split(path)
    for attempt in range(_CREATION_ATTEMPTS):
        descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX + name + ".", dir=folder)
        try:
            os.set_inheritable(descriptor, False)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(temporary, path)
            return descriptor
        except FileNotFoundError:  # a process that has just become the writer tidies up
            os.close(descriptor)
            if attempt == _CREATION_ATTEMPTS - 1:
                raise
        except BaseException:
            os.close(descriptor)
            remove_if_file(temporary)
            raise
    raise AssertionError("unreachable")


def is_locked(path: str) -> bool:
    """Whether a process holds the lock of create_locked(); FileNotFoundError if it is not there."""
    descriptor = _opened(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise DatastoreError(f"cannot lock {path}: {error.strerror or error}") from None
    finally:
        os.close(descriptor)
    return False


def _holder(content: bytes) -> str:
    """What LOCK says of its process; earlier versions wrote a process id alone."""
    process, _, host = content.decode(errors="replace").strip().partition(" ")
    return f"{process or 'unknown'} on {host}" if host else process or "unknown"


class FolderLock:
    """The right to fold: one process of a folder at a time; a kill releases it.

    LOCK holds the process's id and host, for people.
    """

    def __init__(self, folder: str) -> None:
        """DatastoreInUse if another process (or another object of this one) has it."""
        path = os.path.join(folder, "LOCK")
        self._file = _opened(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
        try:
            found = os.fstat(self._file)
            if found.st_nlink > 1 or found.st_size > _LOCK_BYTES:
                raise DatastoreError(
                    f"{path} must hold a process id and a host under one name, and does not: "
                    "remove it"
                )
            self._take(folder)
        except BaseException:
            os.close(self._file)
            raise

    def _take(self, folder: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(self._file, _LOCK_BYTES, 0))
            raise DatastoreInUse(
                f"datastore {folder} is in use by process {holder}: stop it first, or use its "
                "HTTP routes"
            ) from None
        except OSError as error:
            raise DatastoreError(
                f"cannot lock datastore {folder}: {error.strerror or error}"
            ) from None
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
        except OSError as error:
            raise DatastoreError(
                f"cannot write to datastore {folder}: {error.strerror or error}"
            ) from None

    def release(self) -> None:
        os.close(self._file)
