"""A copy of a folder on this machine, as of one moment, while a server may be writing to it."""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike, fspath

from ..config import DatastoreError
from ..files import FolderLock, remove_if_file, remove_temporaries, replace_file, sync_folder
from ..folder import check_folder_owner
from ..maintenance import verify_folder
from ..manifest import FileEntry, write_manifest
from .card import NAME as CARD
from .card import read_card, write_card
from .cut import Cut
from .parts import Part, manifest_of, parts_of
from .room_left import check_room

Report = Callable[[int, int], None]
"""Told of progress: bytes that are there, bytes there are to be."""

# Each round copies what has changed since a deletion; nobody deletes so often.
MOST_ROUNDS = 20


@dataclass(frozen=True)
class Copied:
    """What a copy holds."""

    folder: str
    tokens: int
    nbytes: int
    files: int
    rounds: int
    """1, and one more each time that something was deleted from the source meanwhile."""
    problems: tuple[str, ...]
    """Damaged files of the source, which the copy lacks."""


def snapshot_folder(
    source: str | PathLike[str],
    target: str | PathLike[str],
    report: Report = lambda done, total: None,
) -> Copied:
    """Copies a datastore's folder into a new one, which appears under its name whole and verified.

    A server may go on writing to the source. The copy is as of one moment, at the latest when this
    returns; what was deleted before then is in none of its files. Verified are all its checksums.
    Killed, it leaves TARGET.partial, and the same call goes on with it.

    Raises DatastoreError: the target exists, a disk is full or fails, the source is no datastore,
    or the copy does not verify. TARGET.partial is removed then.
    """
    source, target = os.path.abspath(fspath(source)), os.path.abspath(fspath(target))
    if os.path.realpath(target).startswith(os.path.realpath(source) + os.sep):
        raise DatastoreError(f"{target} lies in the datastore that is copied: name another folder")
    check_vacant(target)
    with partial_folder(target) as partial:
        try:
            copied = _in_rounds(source, target, partial, report)
        except BaseException as error:
            if isinstance(error, Exception):
                shutil.rmtree(partial, ignore_errors=True)
            raise
    return copied


def _in_rounds(source: str, target: str, partial: str, report: Report) -> Copied:
    for turn in range(1, MOST_ROUNDS + 1):
        with Cut(source) as cut:
            parts = parts_of(cut, _everything, cut.damaged)
            _write_parts(partial, parts, report)
            write_manifest(partial, manifest_of(cut, parts))
            write_card(partial, read_card(source))
            _verify(partial)
            with Cut(source) as now:
                if now.has_lost(cut, _everything):
                    continue
            publish_folder(partial, target)
            if _has_lost(source, cut, target, partial):
                continue
            tokens = sum(part.entry.tokens for part in parts)
            size = sum(part.size for part in parts)
            return Copied(target, tokens, size, len(parts), turn, tuple(cut.problems))
    raise DatastoreError(f"something is deleted from {source} all the time: try again later")


def _has_lost(source: str, cut: Cut, target: str, partial: str) -> bool:
    """Whether something was deleted before the copy had its name, which it then gives back."""
    lost = True
    try:
        with Cut(source) as now:
            lost = now.has_lost(cut, _everything)
    finally:
        if lost:
            os.rename(target, partial)
    return lost


def _everything(_entry: FileEntry) -> bool:
    return True


def _write_parts(partial: str, parts: list[Part], report: Report) -> None:
    keep_only(partial, [part.entry.name for part in parts])
    missing = [part for part in parts if not is_there(partial, part.entry.name, part.size)]
    done, total = sum(p.size for p in parts), sum(p.size for p in parts)
    done -= sum(part.size for part in missing)
    check_room(partial, total - done)
    for part in missing:
        with replace_file(os.path.join(partial, part.entry.name)) as copy:
            for block in part.blocks():
                copy.write(block)
                done += len(block)
                report(done, total)


def _verify(partial: str) -> None:
    problems = verify_folder(partial, order=False)
    if problems:
        raise DatastoreError(f"the copy does not verify: {problems[0]}; try again")


# -- folders that are being filled ---------------------------------------------------------


def check_vacant(target: str) -> None:
    """DatastoreError unless there is no such folder, or an empty one."""
    if not os.path.lexists(target):
        return
    if os.path.islink(target) or not os.path.isdir(target) or os.listdir(target):
        raise DatastoreError(f"{target} exists and is no empty folder: name another one")


@contextlib.contextmanager
def partial_folder(target: str) -> Iterator[str]:
    """TARGET.partial, made or found, which no other process fills meanwhile.

    Raises DatastoreError: another one does, or it cannot be made.
    """
    partial = target + ".partial"
    try:
        os.makedirs(os.path.dirname(partial), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(partial, 0o700)
        if not stat.S_ISDIR(os.lstat(partial).st_mode):
            raise DatastoreError(f"{partial} must be a folder, and is not: remove it")
    except OSError as error:
        raise DatastoreError(f"cannot make {partial}: {error.strerror or error}") from None
    check_folder_owner(partial)
    lock = FolderLock(partial)
    try:
        yield partial
    finally:
        lock.release()


def is_there(folder: str, name: str, size: int) -> bool:
    """Whether a plain file of that size has the name: it got it when it was whole."""
    try:
        found = os.lstat(os.path.join(folder, name))
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size and found.st_nlink == 1


def keep_only(folder: str, names: Iterable[str]) -> None:
    """Removes all but these files, the lock and the card from a folder that is being filled."""
    kept = {*names, "LOCK", CARD}
    remove_temporaries(folder)
    for name in os.listdir(folder):
        if name not in kept and not remove_if_file(os.path.join(folder, name)):
            raise DatastoreError(f"cannot remove {os.path.join(folder, name)}: remove it by hand")


def publish_folder(partial: str, target: str) -> None:
    """Gives a filled folder its name, on the disk itself. DatastoreError if it cannot."""
    try:
        os.rename(partial, target)
        sync_folder(os.path.dirname(target))
    except OSError as error:
        raise DatastoreError(f"cannot name {target}: {error.strerror or error}") from None
