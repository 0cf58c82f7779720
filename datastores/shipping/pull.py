"""A datastore from an address into a folder of this machine."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from typing import BinaryIO

from ..config import DatastoreError
from ..container import read_outline
from ..files import open_file, replace_file
from ..manifest import check_same_tokenizer, read_manifest, write_manifest
from .card import README, write_card
from .remote import TIMEOUT_S, WRITE_BYTES, RemoteFolder
from .room_left import check_room
from .shipment import MAX_BYTES, NAME, Shipment, ShippedFile, block_digest, read_shipment
from .snapshots import Report, check_vacant, is_there, keep_only, partial_folder, publish_folder

_PART = ".part"
_BLOCK_TRIES = 3


@dataclass(frozen=True)
class Pulled:
    """What has come."""

    folder: str
    tokens: int
    nbytes: int
    received: int
    """Bytes that were not here before."""


class _Changed(Exception):
    """Another datastore has taken the place of the one that was being pulled."""


def pull(
    address: str,
    target: str | PathLike[str],
    *,
    vocab_size: int | None = None,
    tokenizer_fingerprint: str | None = None,
    report: Report = lambda done, total: None,
    timeout: float = TIMEOUT_S,
) -> Pulled:
    """Brings the datastore at an address into a new folder, which appears whole and verified.

    Every block is compared with its checksum. Interrupted, or out of room, it leaves
    TARGET.partial, and the same call goes on with it, in the middle of a file too. A folder that
    holds this very datastore already is left as it is.

    Raises DatastoreError: the address does not answer or has no datastore, one of another
    tokenizer than given, of a newer format, or a damaged one; or the folder cannot be written.
    Nothing is ever written outside TARGET and TARGET.partial.
    """
    target = os.path.abspath(fspath(target))
    remote = RemoteFolder(address, timeout)
    for attempt in range(2):
        shipment = find_shipment(remote)
        check_same_tokenizer(remote.shown, shipment.manifest, vocab_size, tokenizer_fingerprint)
        if pulled_identity(target) == shipment.identity:
            return Pulled(target, shipment.tokens, shipment.nbytes, 0)
        check_vacant(target)
        try:
            with partial_folder(target) as partial:
                received = _Receiver(remote, partial, shipment, report).run()
                publish_folder(partial, target)
            return Pulled(target, shipment.tokens, shipment.nbytes, received)
        except _Changed:
            if attempt:
                break
    raise DatastoreError(f"{remote.shown} changes while it is pulled: try again later")


def find_shipment(remote: RemoteFolder) -> Shipment:
    """What lies at an address. DatastoreError: nothing, or nothing that can be used."""
    text = remote.read_if_there(NAME, MAX_BYTES)
    if text is None:
        raise DatastoreError(
            f"there is no datastore at {remote.shown}: it has no {NAME}, which `sglang-ext "
            "datastore push` writes last"
        )
    return read_shipment(text, f"{remote.shown}/{NAME}")


def pulled_identity(folder: str) -> str | None:
    """The identity of the shipment that a folder was pulled from; None: it was not."""
    try:
        if read_manifest(folder) is None:
            return None
        with open_file(os.path.join(folder, NAME)) as file:
            return read_shipment(file.read(MAX_BYTES), NAME).identity
    except (OSError, DatastoreError):
        return None


def _write(part: BinaryIO, block: bytes) -> None:
    left = memoryview(block)
    while left:
        left = left[part.write(left[:WRITE_BYTES]) :]


class _Receiver:
    """Fills a folder with what lies at an address."""

    def __init__(
        self, remote: RemoteFolder, folder: str, shipment: Shipment, report: Report
    ) -> None:
        self._remote, self._folder, self._shipment = remote, folder, shipment
        self._report = report
        self._done = self._received = 0

    def run(self) -> int:
        """Returns the bytes that came. Raises _Changed, DatastoreError."""
        shipment, folder = self._shipment, self._folder
        names = [file.name for file in shipment.files]
        keep_only(folder, [*names, *(name + _PART for name in names)])
        missing = [f for f in shipment.files if not is_there(folder, f.name, f.nbytes)]
        self._done = shipment.nbytes - sum(file.nbytes for file in missing)
        here = sum(min(file.nbytes, self._part_bytes(file)) for file in missing)
        try:
            check_room(folder, shipment.nbytes - self._done - here)
            for file in missing:
                self._receive(file)
        except OSError as error:
            raise DatastoreError(
                f"cannot write to {folder}: {error.strerror or error}; {self._done / 1e6:,.1f} of "
                f"{shipment.nbytes / 1e6:,.1f} MB are there, and the same command goes on"
            ) from None
        self._finish()
        return self._received

    def _receive(self, file: ShippedFile) -> None:
        """A file, gone on with where it was left, under its name once all of it is right."""
        path = os.path.join(self._folder, file.name)
        # O_NOFOLLOW: a name that leads elsewhere is not written through.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path + _PART, flags, 0o600), "r+b", buffering=0) as part:
            first = self._intact_blocks(part, file)
            part.seek(first * self._shipment.block_bytes)
            part.truncate()
            self._done += part.tell()
            for i, block in enumerate(self._blocks(file, first), first):
                if block_digest(block) != file.blocks[i]:
                    block = self._again(file, i)
                _write(part, block)
                self._done += len(block)
                self._received += len(block)
                self._report(self._done, self._shipment.nbytes)
            os.fsync(part.fileno())
        os.rename(path + _PART, path)
        self._check_content(file, path)

    def _intact_blocks(self, part: BinaryIO, file: ShippedFile) -> int:
        """How many blocks an earlier call has left that are right."""
        for i, expected in enumerate(file.blocks):
            size = min(self._shipment.block_bytes, file.nbytes - i * self._shipment.block_bytes)
            block = part.read(size)
            if len(block) != size or block_digest(block) != expected:
                return i
        return len(file.blocks)

    def _blocks(self, file: ShippedFile, first: int) -> Iterator[bytes]:
        """The blocks of a file from one on, as they come."""
        size, at = self._shipment.block_bytes, 0
        skipped = first * size
        for name, nbytes in self._shipment.pieces(file):
            start = max(0, skipped - at)
            spans = [(i, min(i + size, nbytes)) for i in range(start, nbytes, size)]
            try:
                yield from self._remote.blocks(name, spans)
            except DatastoreError:
                self._check_unchanged()
                raise
            at += nbytes

    def _again(self, file: ShippedFile, i: int) -> bytes:
        """A block that did not come right, asked for again. DatastoreError: it is damaged there."""
        size, piece_bytes = self._shipment.block_bytes, self._shipment.piece_bytes
        at = i * size
        name, nbytes = self._shipment.pieces(file)[at // piece_bytes]
        start = at % piece_bytes
        for _ in range(_BLOCK_TRIES):
            block = self._remote.read(name, start, min(start + size, nbytes))
            if block_digest(block) == file.blocks[i]:
                return block
        self._check_unchanged()
        raise DatastoreError(
            f"{self._remote.shown}/{name} is damaged: the checksum of its bytes from {start} on is "
            "wrong; push the datastore there again"
        )

    def _check_unchanged(self) -> None:
        """Raises _Changed if another datastore lies there now: its push has removed this one's."""
        with contextlib.suppress(DatastoreError):  # what went wrong first is what is told
            if find_shipment(self._remote).identity != self._shipment.identity:
                raise _Changed

    def _check_content(self, file: ShippedFile, path: str) -> None:
        """DatastoreError, and the file is removed, unless it is the sub-index that it should be.

        By its header: all of it is checked when the datastore is opened.
        """
        shipment = self._shipment
        try:
            vocab_size, fingerprint, segments = read_outline(path)
            owners = {owner for owner, _ in segments}
            if (vocab_size, fingerprint) != (shipment.vocab_size, shipment.tokenizer_fingerprint):
                raise DatastoreError("it was built for another tokenizer than its datastore")
            wrong = file.corpus is not None and owners != {file.corpus}
            if wrong or sum(tokens for _, tokens in segments) != file.tokens:
                raise DatastoreError(f"it holds something else than {NAME} says")
        except DatastoreError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise DatastoreError(
                f"{self._remote.shown}/{file.name} cannot be used: {error}"
            ) from None

    def _part_bytes(self, file: ShippedFile) -> int:
        try:
            return os.lstat(os.path.join(self._folder, file.name + _PART)).st_size
        except OSError:
            return 0

    def _finish(self) -> None:
        text = self._remote.read_if_there(README, MAX_BYTES)
        for name, content in ((NAME, self._shipment.to_json()), (README, text)):
            if content is not None:
                with replace_file(os.path.join(self._folder, name)) as file:
                    file.write(content)
        write_card(self._folder, self._shipment.card)
        write_manifest(self._folder, self._shipment.manifest)
