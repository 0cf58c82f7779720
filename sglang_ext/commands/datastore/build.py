"""`sglang-ext datastore build` and `add`: a corpus from sources, in steps that can be resumed."""

import argparse
import os
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from datastores import CorpusBuilder, DatastoreError
from datastores.manifest import read_manifest
from datastores.shipping import note_source
from datastores.sources import (
    BEGINNING,
    Position,
    ReadOptions,
    Record,
    Source,
    SourceError,
    find_sources,
    read_source,
)
from sglang_ext.commands.datastore.build_progress import BuildProgress, Waiting
from sglang_ext.commands.datastore.model_tokenizer import ModelTokenizer

INTERRUPTED = 130
# Texts tokenized at a time; encodings take about 100 bytes per token.
_BATCH_CHARS = 1 << 22
_BATCH_TEXTS = 1 << 12
_SHOWN_BAD = 5
_SKIP_HINT = "(--skip-bad passes over such lines and rows)"


class _Document(NamedTuple):
    """One document of all sources."""

    source: int
    record: Record
    tokens: np.ndarray | None
    """int32[n]; None if the record cannot be used."""


def run(args: argparse.Namespace) -> int:
    """Builds the corpus; returns the exit code."""
    sources, left_out = find_sources(args.sources, args.format, args.glob)
    corpus = args.corpus or _default_name(args.sources[0])
    _check_target(args.folder, corpus, args.datastore_command)
    tokenizer = ModelTokenizer(args.tokenizer, args.vocab_size)
    options = ReadOptions(
        vocab_size=tokenizer.vocab_size,
        fields=tuple(args.field or ["text"]),
        max_line_bytes=args.max_line_mb << 20,
        allow_pickle=args.allow_pickle,
    )
    _check_first_records(sources, options, args.skip_bad)
    with CorpusBuilder(
        args.folder,
        corpus,
        vocab_size=tokenizer.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        chunk_tokens=args.chunk_tokens,
        resume=not args.restart,
    ) as builder:
        build = CorpusBuild(builder, sources, options, tokenizer, args.skip_bad)
        if left_out:
            build.progress.say(f"left out: {left_out} files of other kinds (--glob takes others)")
        try:
            tokens = build.run()
        except (KeyboardInterrupt, DatastoreError, OSError) as error:
            build.progress.close()
            kept = _kept(builder)
            if isinstance(error, KeyboardInterrupt):
                print(f"interrupted. {kept}", file=build.progress.file)
                return INTERRUPTED
            if builder.committed_tokens:
                raise DatastoreError(f"{error}. {kept}") from None
            raise
        _note_in_card(args, corpus, build.progress)
    skipped = f"; {build.skipped} bad lines or rows skipped" if build.skipped else ""
    print(
        f"corpus {corpus!r} in {args.folder}: {tokens:,} tokens, {build.documents:,} documents "
        f"({build.progress.seconds:.1f} s){skipped}"
    )
    return 0


def _note_in_card(args: argparse.Namespace, corpus: str, progress: BuildProgress) -> None:
    """What the corpus was built from, by names alone: a card travels, and paths tell too much."""
    names = [os.path.basename(os.path.abspath(source)) for source in args.sources]
    try:
        note_source(args.folder, corpus, names, args.tokenizer)
    except DatastoreError as error:
        progress.say(f"the datastore's card lacks its sources: {error}")


def _kept(builder: CorpusBuilder) -> str:
    return (
        f"{builder.committed_tokens:,} tokens of corpus {builder.corpus!r} are stored; the same "
        "command goes on from there"
    )


class CorpusBuild:
    """Reads, tokenizes and stores; what is stored says how far the sources are read."""

    def __init__(
        self,
        builder: CorpusBuilder,
        sources: Sequence[Source],
        options: ReadOptions,
        tokenizer: ModelTokenizer,
        skip_bad: bool = False,
    ) -> None:
        """Begins where the builder's progress says.

        Raises DatastoreError if it was begun with other sources or fields.
        """
        self._builder, self._sources, self._options = builder, sources, options
        self._tokenizer, self._skip_bad = tokenizer, skip_bad
        self._source, self._position, read = 0, BEGINNING, 0
        self.documents = self.skipped = 0
        self._tokens = 0  # of this run
        if builder.progress is not None and builder.committed_tokens:
            read = self._resume(builder.progress)
        self._before = [0, *np.cumsum([source.size for source in sources]).tolist()]
        self.progress = BuildProgress(self._before[-1], self._before[self._source] + read)
        if builder.committed_tokens:
            self.progress.say(
                f"going on with corpus {builder.corpus!r} after {builder.committed_tokens:,} tokens"
            )

    def run(self) -> int:
        """Builds to the end; returns the corpus's tokens."""
        last: _Document | None = None
        for last in self._tokenized(self._documents()):
            self._take(last)
            if self._builder.buffered_tokens >= self._builder.chunk_tokens:
                self._commit(last)
        if self._builder.buffered_tokens and last is not None:
            # With its place, so that a kill while finish() merges repeats nothing.
            self._commit(last)
        self.progress.close()
        with Waiting("merging sub-indices"):
            return self._builder.finish()

    def _documents(self) -> Iterator[tuple[int, Record]]:
        start = self._position
        for i in range(self._source, len(self._sources)):
            for record in read_source(self._sources[i], self._options, start):
                yield i, record
            start = BEGINNING

    def _tokenized(self, documents: Iterator[tuple[int, Record]]) -> Iterator[_Document]:
        for batch in _batches(documents):
            texts = [r.content for _, r in batch if isinstance(r.content, str)]
            encoded = iter(self._tokenizer.encode(texts))
            for source, record in batch:
                tokens = record.content
                if isinstance(tokens, str):
                    tokens = next(encoded)
                yield _Document(source, record, tokens if isinstance(tokens, np.ndarray) else None)

    def _take(self, document: _Document) -> None:
        error = document.record.content
        if document.tokens is not None:
            try:
                self._builder.add(document.tokens)
            except DatastoreError as wrong:
                place = f"{self._sources[document.source].path}, document"
                error = SourceError(f"{place} {document.record.position.number}: {wrong}")
            else:
                self.documents += document.tokens.size > 0
                self._tokens += document.tokens.size
        if isinstance(error, SourceError):
            self._pass_over(error)
        done = self._before[document.source] + document.record.done
        self.progress.update(done, self._tokens)

    def _pass_over(self, error: SourceError) -> None:
        if not self._skip_bad:
            raise SourceError(f"{error} {_SKIP_HINT}")
        self.skipped += 1
        if self.skipped <= _SHOWN_BAD:
            self.progress.say(f"skipped: {error}")
        elif self.skipped == _SHOWN_BAD + 1:
            self.progress.say("skipped: more of them; they are counted")

    # -- resuming --------------------------------------------------------------------------

    def _commit(self, last: _Document) -> None:
        self.progress.busy(f"sorting {self._builder.buffered_tokens:,} tokens")
        self._builder.commit(
            {
                "sources": "".join(source.identity for source in self._sources),
                "fields": list(self._options.fields),
                "source": last.source,
                "position": list(last.record.position),
                "done": last.record.done,
                "documents": self.documents,
                "skipped": self.skipped,
            }
        )

    def _resume(self, stored: dict[str, Any]) -> int:
        """Takes the place of the last commit; returns the bytes read of its source."""
        self._check_same_sources(stored)
        self._source = stored["source"]
        self._position = Position(*stored["position"])
        self.documents, self.skipped = stored["documents"], stored["skipped"]
        return stored["done"]

    def _check_same_sources(self, stored: dict[str, Any]) -> None:
        hint = "; give the same as before, or begin anew with --restart"
        corpus = f"corpus {self._builder.corpus!r} was begun with"
        if stored["fields"] != list(self._options.fields):
            raise DatastoreError(f"{corpus} --field {' '.join(stored['fields'])}{hint}")
        known = [stored["sources"][i : i + 8] for i in range(0, len(stored["sources"]), 8)]
        for source, identity in zip(self._sources, known, strict=False):
            if source.identity != identity:
                raise DatastoreError(
                    f"{corpus} other sources: {source.path} is new or has changed{hint}"
                )
        if len(known) != len(self._sources):
            raise DatastoreError(
                f"{corpus} {len(known)} files, and there are {len(self._sources)} now{hint}"
            )


def _batches(documents: Iterator[tuple[int, Record]]) -> Iterator[list[tuple[int, Record]]]:
    batch: list[tuple[int, Record]] = []
    size = 0
    for item in documents:
        batch.append(item)
        size += len(item[1].content) if not isinstance(item[1].content, SourceError) else 0
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _default_name(source: str) -> str:
    name = os.path.basename(os.path.abspath(source))
    name = name.removesuffix(".gz").rsplit(".", 1)[0] or name
    return name.encode(errors="replace").decode()  # a file's name need not be UTF-8


def _check_target(folder: str, corpus: str, command: str) -> None:
    """DatastoreError if `build` would change a datastore, or `add` make one, or the corpus exists.

    The builder checks the last again; here it costs nothing yet.
    """
    manifest = read_manifest(folder) if os.path.isdir(folder) else None
    if manifest is None:
        if command == "add":
            raise DatastoreError(
                f"there is no datastore in {folder}; `sglang-ext datastore build` begins one"
            )
        return
    corpora = {file.corpus for file in manifest.files} | manifest.building.keys()
    if corpus in corpora - manifest.building.keys():
        raise DatastoreError(
            f"corpus {corpus!r} is in {folder} already: choose another --corpus, or first remove "
            f"it with `sglang-ext datastore delete {quote(folder)} --corpus {quote(corpus)}`"
        )
    if command == "build" and corpora - {corpus}:
        raise DatastoreError(
            f"there is a datastore in {folder} already; `sglang-ext datastore add` puts another "
            "corpus into it"
        )


def _check_first_records(sources: Sequence[Source], options: ReadOptions, skip_bad: bool) -> None:
    """SourceError now, not hours later, for sources that have not what is asked of them."""
    for source in sources:
        if source.format == "text":
            continue
        first = next(read_source(source, options), None)
        if first is not None and isinstance(first.content, SourceError) and not skip_bad:
            raise SourceError(f"{first.content} {_SKIP_HINT}")
