"""Checking and joining whole folders."""

import os
import shutil
from collections.abc import Sequence
from os import PathLike, fspath

import numpy as np
from numba import njit

from .config import DatastoreError
from .container import read_container
from .datastore import Datastore
from .files import FolderLock, open_file, replace_file
from .folder import Folder, check_folder_owner
from .log_names import log_name
from .manifest import FileEntry, check_same_tokenizer, read_manifest
from .segment import Segment
from .suffix_array import _not_after, make_landmarks
from .wal import read_log


def check_folder(
    path: str | PathLike[str], tokenizer_fingerprint: str | None = None, shared: bool = False
) -> None:
    """DatastoreError unless a server could serve from this folder, or create it; takes no time.

    shared: as in Datastore.open(); another process may be writing to it.
    Sub-indices are not looked at: a damaged one is left out when the datastore is opened.
    """
    folder = os.path.abspath(fspath(path))
    if not os.path.exists(folder):
        parent = os.path.dirname(folder)
        if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
            raise DatastoreError(f"cannot create datastore {folder}: {parent} is not writable")
        return
    check_folder_owner(folder)
    manifest = read_manifest(folder)
    if manifest is not None:
        check_same_tokenizer(folder, manifest, None, tokenizer_fingerprint)
    elif set(os.listdir(folder)) - {"LOCK"}:
        raise DatastoreError(f"{folder} is not a datastore (it has no MANIFEST) and not empty")
    if not shared:
        FolderLock(folder).release()


def verify_folder(path: str | PathLike[str], order: bool = True) -> list[str]:
    """What is wrong with a datastore's folder, one line each; empty: all is well.

    Reads everything: checksums, the order of every suffix array (most of the time; without
    `order` it is taken from the checksums), the logs. A server may be using the folder meanwhile.
    """
    folder = os.path.abspath(fspath(path))
    try:
        if os.path.exists(folder):
            check_folder_owner(folder)
        manifest = read_manifest(folder)
    except DatastoreError as error:
        return [str(error)]
    if manifest is None:
        return [f"{folder} is not a datastore: it has no MANIFEST"]
    problems = []
    vocab_size, fingerprint = manifest.vocab_size, manifest.tokenizer_fingerprint
    for entry in manifest.files:
        file = os.path.join(folder, entry.name)
        try:
            container = read_container(file, vocab_size, fingerprint)
        except DatastoreError as error:
            if os.path.lexists(file) or _is_named(folder, entry):
                problems.append(str(error))
            continue
        for owner, segment in container.segments if order else ():
            wrong = _disorder(segment, vocab_size)
            if wrong:
                problems.append(f"sub-index {file}, {owner!r}: {wrong}")
    logs = sorted(name for name in os.listdir(folder) if log_name(name) is not None)
    for name in logs:
        log = os.path.join(folder, name)
        try:
            content = read_log(log, vocab_size, fingerprint)
        except DatastoreError as error:
            if os.path.lexists(log):  # else it has been folded meanwhile
                problems.append(str(error))
            continue
        if content.damaged_bytes and not content.torn_only:
            problems.append(f"log {log} is damaged: {content.damaged_bytes} bytes are passed over")
    return problems


def _is_named(folder: str, entry: FileEntry) -> bool:
    """Whether the manifest names a file now: a server may have replaced both meanwhile."""
    manifest = read_manifest(folder)
    return manifest is not None and entry in manifest.files


def _disorder(segment: Segment, vocab_size: int) -> str | None:
    counts = np.bincount(segment.suffixes, minlength=segment.tokens.size)
    if (counts != (segment.tokens != vocab_size)).any():
        return "the suffix array does not hold every token once"
    at = _first_disorder(segment.tokens, segment.suffixes, vocab_size)
    if at >= 0:
        return f"suffix {at} is out of order"
    expected = make_landmarks(segment.tokens, segment.suffixes, vocab_size)
    if not np.array_equal(expected, segment.landmarks):
        return "the landmarks do not fit the suffix array"
    return None


@njit(cache=True, nogil=True)
def _first_disorder(tokens, suffixes, separator):
    """The first entry of a suffix array that sorts before its predecessor; -1: none."""
    for i in range(1, suffixes.size):
        if not _not_after(tokens, suffixes[i - 1], suffixes[i], separator):
            return i
    return -1


def merge_folders(
    sources: Sequence[str | PathLike[str]], target: str | PathLike[str]
) -> dict[str, int]:
    """Copies corpora and served outputs of datastores into another, created if need be.

    Namespaces of the same name are joined. Returns tokens by source. Raises DatastoreError, with
    the target as it was before that source: another tokenizer, a corpus that both have, a damaged
    file, a folder in use.
    """
    copied = {}
    for source in [os.path.abspath(fspath(source)) for source in sources]:
        with Datastore.open(source, create=False) as store:
            store.fold()  # so that nothing is in logs only
            if store.info().problems:
                raise DatastoreError(store.info().problems[0])
        opened = Folder(
            source, vocab_size=None, tokenizer_fingerprint=None, create=False, read_only=False
        )
        try:
            copied[source] = _copy_into(opened, fspath(target))
        finally:
            opened.close()
    return copied


def _copy_into(source: Folder, target: str) -> int:
    folder = Folder(
        target,
        vocab_size=source.manifest.vocab_size,
        tokenizer_fingerprint=source.manifest.tokenizer_fingerprint,
        create=True,
        read_only=False,
    )
    try:
        taken = {file.entry.corpus for file in folder.files}
        wanted = [f for f in source.files if f.entry.corpus not in source.manifest.building]
        for corpus in {file.entry.corpus for file in wanted}:
            if corpus is not None and corpus in taken:
                raise DatastoreError(f"corpus {corpus!r} is in {source.path} and in {folder.path}")
        entries = []
        for file in wanted:
            name = folder.new_file_name()
            with (
                open_file(source.file_path(file.entry.name)) as original,
                replace_file(folder.file_path(name)) as copy,
            ):
                shutil.copyfileobj(original, copy, 1 << 24)
            entries.append(FileEntry(name, file.entry.tokens, file.entry.corpus))
        # Deletions count for documents with lower numbers than their own.
        number = max(folder.manifest.next_number, source.manifest.next_number)
        folder.publish(add=entries, next_number=number)
        return sum(entry.tokens for entry in entries)
    finally:
        folder.close()
