"""A datastore's folder, of which a server may be running, to an address."""

import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import PathLike, fspath

from ..config import DatastoreError
from ..corpus_names import shown_name
from ..manifest import FileEntry, check_same_tokenizer
from .card import README, Card, read_card, readme
from .cut import Cut, is_shared_corpus
from .parts import Part, parts_of
from .remote import TIMEOUT_S, RemoteFolder
from .shipment import (
    BLOCK_BYTES,
    MAX_BYTES,
    NAME,
    PIECE_BYTES,
    Shipment,
    ShippedFile,
    block_digest,
    is_piece,
    pieces_of,
    read_shipment,
)
from .snapshots import MOST_ROUNDS, Report

# What the Hub puts into a repository by itself.
_HARMLESS = {NAME, README, ".gitattributes"}


@dataclass(frozen=True)
class Pushed:
    """What lies at an address now."""

    address: str
    tokens: int
    nbytes: int
    sent: int
    """Bytes that were not there before."""
    problems: tuple[str, ...]
    """Damaged files of the source, which were left out."""


def push(
    source: str | PathLike[str],
    address: str,
    *,
    served: bool,
    card: Card | None = None,
    report: Report = lambda done, total: None,
    timeout: float = TIMEOUT_S,
    piece_bytes: int = PIECE_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> Pushed:
    """Puts a folder's datastore, as of one moment, to an address, in place of the one there.

    served: with the tenants' outputs and corpora; else the shared corpora alone. card: what to say
    of it; default: the folder's. What was deleted from the source before this returns is not at
    the address. Interrupted, the same call goes on: what lies there already is compared by its
    checksum. timeout: seconds within which the address must answer.

    Raises DatastoreError: the address does not answer, holds something else or a datastore of
    another tokenizer, or there is nothing to push.
    """
    folder = os.path.abspath(fspath(source))
    wanted = _all if served else is_shared_corpus
    with Cut(folder) as cut:  # whatever is wrong here is told before anybody is asked
        _check_content(cut, wanted)
    remote = RemoteFolder(address, timeout)
    sender = _Sender(remote, piece_bytes, block_bytes, report)
    damaged: set[str] = set()
    for _ in range(MOST_ROUNDS):
        with Cut(folder) as cut:
            _check_content(cut, wanted)
            shipment = _send(cut, sender, wanted, card or read_card(folder), damaged)
            if shipment is not None:
                size, tokens = shipment.nbytes, shipment.tokens
                return Pushed(remote.shown, tokens, size, sender.sent, tuple(cut.problems))
    raise DatastoreError(f"something is deleted from {folder} all the time: try again later")


def _send(
    cut: Cut,
    sender: "_Sender",
    wanted: Callable[[FileEntry], bool],
    card: Card,
    damaged: set[str],
) -> Shipment | None:
    """Sends a cut; None: something of it was deleted meanwhile, or is damaged, which joins
    `damaged`, and so another cut has to take its place."""
    sender.check(cut)
    checking = cut.check_aside()
    sent = sender.send(parts_of(cut, wanted, damaged | _damaged_now(cut)))
    checking.join()
    if not cut.damaged <= damaged:
        damaged |= cut.damaged
        return None
    if _has_lost(cut, wanted):
        return None
    shipment = _shipment(cut, wanted, card, sent, sender.piece_bytes, sender.block_bytes)
    sender.publish(shipment)
    return None if _has_lost(cut, wanted) else shipment


def _has_lost(cut: Cut, wanted: Callable[[FileEntry], bool]) -> bool:
    with Cut(cut.path) as now:
        return now.has_lost(cut, wanted)


def holds_private(source: str | PathLike[str]) -> tuple[int, int]:
    """What of a folder is not everybody's: (namespaces with served outputs, their corpora)."""
    with Cut(source) as cut:
        namespaces = {owner for owner, corpus, _ in cut.segments() if corpus is None}
        entries = [file.entry for file in cut.files if file.entry.corpus is not None]
        bound = {entry.corpus for entry in entries if not is_shared_corpus(entry)}
    return len(namespaces), len(bound)


class _Sender:
    """Puts files to an address, and knows what lies there."""

    def __init__(
        self, remote: RemoteFolder, piece_bytes: int, block_bytes: int, report: Report
    ) -> None:
        self._remote = remote
        self.piece_bytes, self.block_bytes = piece_bytes, block_bytes
        self._report = report
        self._done: dict[str, ShippedFile] = {}
        """By name, of this call."""
        self._known: dict[str, ShippedFile] = {}
        """Those that the datastore at the address names."""
        self._sizes: dict[str, int] | None = None
        self.sent = 0

    def check(self, cut: Cut) -> None:
        """DatastoreError unless the address is free, or holds a datastore of the same tokenizer."""
        if self._sizes is not None:
            return
        text = self._remote.read_if_there(NAME, MAX_BYTES)
        if text is not None:
            there = read_shipment(text, f"{self._remote.shown}/{NAME}")
            mine = cut.manifest
            check_same_tokenizer(
                self._remote.shown, there.manifest, mine.vocab_size, mine.tokenizer_fingerprint
            )
            if there.block_bytes == self.block_bytes and there.piece_bytes == self.piece_bytes:
                self._known = {file.name: file for file in there.files}
        sizes = self._remote.sizes()
        strange = [name for name in sizes if name not in _HARMLESS and not is_piece(name)]
        if strange:
            raise DatastoreError(
                f"{self._remote.shown} holds something else ({strange[0][:60]!r}): name a folder "
                "that is empty or holds a datastore"
            )
        if not sizes:
            self._remote.prepare()
        self._sizes = sizes

    def send(self, parts: list[Part]) -> tuple[ShippedFile, ...]:
        """Sees that each part lies at the address; returns what does."""
        total, done = sum(part.size for part in parts), 0
        files = []
        for part in parts:
            file = self._done.get(part.entry.name)
            if file is None:
                file = self._send_file(part, done, total)
                self._done[part.entry.name] = file
            files.append(file)
            done += part.size
            self._report(done, total)
        return tuple(files)

    def _send_file(self, part: Part, done: int, total: int) -> ShippedFile:
        entry = part.entry
        blocks: list[str] = []
        for number, (name, size) in enumerate(pieces_of(entry.name, part.size, self.piece_bytes)):
            start = number * self.piece_bytes
            if (self._sizes or {}).get(name) == size:
                found = list(self._digests(part, start, size))
                if self._lies_there(entry.name, name, size, found, len(blocks)):
                    blocks += found
                    continue
            if name in (self._sizes or {}):
                self._remote.remove(name)  # a link would be written through
            blocks += self._send_piece(part, name, start, size, done, total)
        return ShippedFile(entry.name, entry.tokens, entry.corpus, part.size, tuple(blocks))

    def _send_piece(
        self, part: Part, name: str, start: int, size: int, done: int, total: int
    ) -> list[str]:
        digests: list[str] = []

        def blocks() -> Iterator[memoryview]:
            digests.clear()
            at = done + start
            with ThreadPoolExecutor(1) as aside:
                for block in self._local(part, start, size):
                    digest = aside.submit(block_digest, block)
                    yield block
                    # Before the next block takes this one's place.
                    digests.append(digest.result())
                    at += len(block)
                    self._report(at, total)

        self._remote.write_blocks(name, blocks)
        self.sent += size
        return digests

    def _lies_there(self, file: str, name: str, size: int, expected: list[str], first: int) -> bool:
        """Whether a piece of that size is what is to be sent: as the datastore there says that it
        wrote, or as it reads, where an earlier call was interrupted."""
        known = self._known.get(file)
        if known is not None:
            return list(known.blocks[first : first + len(expected)]) == expected
        spans = [(i, min(i + self.block_bytes, size)) for i in range(0, size, self.block_bytes)]
        there = self._remote.blocks(name, spans)
        return all(block_digest(b) == e for b, e in zip(there, expected, strict=True))

    def _digests(self, part: Part, start: int, size: int) -> Iterator[str]:
        return map(block_digest, self._local(part, start, size))

    def _local(self, part: Part, start: int, size: int) -> Iterator[memoryview]:
        """A piece of a part, block by block. DatastoreError if it cannot be read."""
        left = size
        try:
            for block in part.blocks(self.block_bytes, start):
                yield block[:left]
                left -= len(block)
                if left <= 0:
                    return
        except OSError as error:
            raise DatastoreError(
                f"cannot read {part.entry.name}: {error.strerror or error}"
            ) from None

    def publish(self, shipment: Shipment) -> None:
        """Has the address say what lies there, and removes what does no more."""
        text = _readme(shipment)
        self._remote.write(README, text.encode())
        self._remote.write(NAME, shipment.to_json())
        kept = {name for file in shipment.files for name, _ in shipment.pieces(file)}
        sizes = self._remote.sizes()
        for name in sizes:
            if is_piece(name) and name not in kept:
                self._remote.remove(name)
        for name, size in ((n, s) for file in shipment.files for n, s in shipment.pieces(file)):
            if sizes.get(name) != size:
                raise DatastoreError(
                    f"{self._remote.shown}/{name} has {sizes.get(name)} bytes there instead of "
                    f"{size}: push again"
                )
        self._sizes = {name: size for name, size in sizes.items() if name in kept}
        self._known = {file.name: file for file in shipment.files}


def _damaged_now(cut: Cut) -> set[str]:
    """The damaged ones of those that deletions may have changed, and so must be read first."""
    return cut.damaged if cut.deletions else set()


def _all(_entry: FileEntry) -> bool:
    return True


def _check_content(cut: Cut, wanted: Callable[[FileEntry], bool]) -> None:
    served = wanted(FileEntry("", 0)) and cut.fresh_documents
    if not served and not any(wanted(file.entry) for file in cut.files):
        raise DatastoreError(f"datastore {cut.path} holds nothing that could be pushed")


def _shipment(
    cut: Cut,
    wanted: Callable[[FileEntry], bool],
    card: Card,
    files: Iterable[ShippedFile],
    piece_bytes: int,
    block_bytes: int,
) -> Shipment:
    manifest = cut.manifest
    documents, namespaces = 0, set()
    for owner, corpus, segment in cut.segments():
        if wanted(FileEntry("", 0, corpus)):
            documents += len(segment.documents)
            namespaces |= set() if corpus is not None else {owner}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    files = tuple(files)
    corpora = {file.corpus for file in files}
    mine = {c: names for c, names in card.sources.items() if c in corpora}
    return Shipment(
        manifest.vocab_size,
        manifest.tokenizer_fingerprint,
        cut.next_number,
        now,
        documents,
        len(namespaces),
        block_bytes,
        piece_bytes,
        replace(card, sources=mine),
        files,
    )


def _readme(shipment: Shipment) -> str:
    corpora: dict[str, int] = {}
    for file in shipment.files:
        if file.corpus is not None:
            name = shown_name(file.corpus)
            corpora[name] = corpora.get(name, 0) + file.tokens
    served = sum(file.tokens for file in shipment.files if file.corpus is None)
    facts = {
        "Tokenizer's fingerprint": shipment.tokenizer_fingerprint or "not noted",
        "Vocabulary": f"{shipment.vocab_size:,}",
        "Size": f"{shipment.tokens:,} tokens, {shipment.documents:,} documents, "
        f"{shipment.nbytes / 1e6:,.1f} MB",
        "Served outputs": f"{served:,} tokens of {shipment.namespaces} namespaces",
        "Made": shipment.created,
    }
    return readme(shipment.card, facts, corpora)
