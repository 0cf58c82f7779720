"""What a copy of a datastore consists of: open sub-index files, some of them made for it."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from ..config import DatastoreError
from ..container import Container, write_sections
from ..manifest import FileEntry, Manifest
from ..segment import Segment
from .cut import Cut
from .remote import WRITE_BYTES


@dataclass(eq=False)
class Part:
    """One sub-index file of a copy."""

    entry: FileEntry
    file: BinaryIO
    size: int

    def blocks(self, block_bytes: int = WRITE_BYTES, start: int = 0) -> Iterator[memoryview]:
        """Its bytes from an offset on; a block lasts until the next one. OSError: unreadable.

        The file's position is neither used nor moved: a check that runs aside maps the same open
        file, for which numpy goes to its end and asks how far that is.
        """
        # New memory for each block would take as long as reading it.
        block = memoryview(bytearray(min(block_bytes, max(1, self.size - start))))
        while size := _filled(self.file, block, start):
            yield block[:size]
            start += size


def parts_of(
    cut: Cut, wanted: Callable[[FileEntry], bool], damaged: Collection[str] = ()
) -> list[Part]:
    """The files of a copy, oldest first: the cut's own, but for those that deletions have changed
    and for what is in no file yet, which are written for the copy, without a name on the disk.

    wanted: as in Cut.has_lost(). damaged: names of files to leave out; one that is passed on as
    it is is not checked here. Raises DatastoreError if one cannot be written, or changed.
    """
    parts = []
    for file in cut.files:
        if not wanted(file.entry) or file.entry.name in damaged:
            continue
        if cut.is_whole(file):
            parts.append(Part(file.entry, file.file, _size(file.file)))
        elif left := cut.remaining(file):
            parts.append(_written(cut, left, file.entry.corpus))
    if wanted(FileEntry("", 0)) and (fresh := cut.fresh):
        parts.append(_written(cut, fresh, None))
    return parts


def manifest_of(cut: Cut, parts: list[Part]) -> Manifest:
    """The manifest of a copy."""
    entries = tuple(part.entry for part in parts)
    manifest = cut.manifest
    numbers = [int(entry.name.split("-")[1].split(".")[0]) for entry in entries]
    return Manifest(
        manifest.vocab_size,
        manifest.tokenizer_fingerprint,
        entries,
        next_file=max([manifest.next_file, *(number + 1 for number in numbers)]),
        next_number=cut.next_number,
    )


def _written(cut: Cut, segments: list[tuple[str, Segment]], corpus: str | None) -> Part:
    """A file without a name, which goes with the process that made it."""
    manifest = cut.manifest
    content = Container(manifest.vocab_size, manifest.tokenizer_fingerprint, tuple(segments))
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the part keeps it open)
        write_sections(file, content)
        file.flush()
    except OSError as error:
        raise DatastoreError(
            f"cannot write to {tempfile.gettempdir()}: {error.strerror or error}"
        ) from None
    tokens = sum(segment.num_tokens for _, segment in segments)
    part = Part(FileEntry("", tokens, corpus), file, _size(file))
    # The same content has the same name, so that a copy which is gone on with knows it again.
    digest = hashlib.blake2b(digest_size=4)
    for block in part.blocks():
        digest.update(block)
    name = f"sub-{manifest.next_file:08d}-{digest.hexdigest()}.idx"
    part.entry = replace(part.entry, name=name)
    return part


def _filled(file: BinaryIO, block: memoryview, start: int) -> int:
    """Fills the block from an offset on; how far: less than all of it at the file's end alone."""
    size = 0
    # One call may read less, on file systems that are not this machine's own.
    while more := os.preadv(file.fileno(), (block[size:],), start + size):
        size += more
    return size


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
