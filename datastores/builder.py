"""Building large corpora in a folder, in steps that survive a kill."""

from dataclasses import replace
from os import PathLike, fspath
from typing import Any

import numpy as np

from .config import DatastoreError
from .container import Container, write_container
from .datastore import TokenIds, check_name
from .folder import Folder, SubIndexFile
from .folding import merge_all
from .input_trie import as_token_ids
from .live import MAX_SEGMENT_TOKENS
from .manifest import FileEntry
from .segment import Document, Segment, build_segments


class CorpusBuilder:
    """Adds one shared corpus to a datastore's folder, which nothing else may write to meanwhile.

    Documents are gathered until commit() turns them into a sub-index file. The corpus is served
    once finish() has run; until then the same name goes on from the last commit. About 30 bytes
    per gathered token are needed in memory.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        corpus: str,
        *,
        vocab_size: int,
        tokenizer_fingerprint: str = "",
        chunk_tokens: int = 1 << 24,
        segment_tokens: int = MAX_SEGMENT_TOKENS,
        resume: bool = True,
    ) -> None:
        """chunk_tokens: when to call commit(). segment_tokens: finish() merges sub-indices up to
        this. resume: go on with an unfinished corpus of the name; else it is begun anew.

        Raises DatastoreError: the corpus exists, another process writes to the folder, or it was
        built for another tokenizer.
        """
        check_name("corpus", corpus)
        self.corpus = corpus
        self.chunk_tokens = chunk_tokens
        self._segment_tokens = segment_tokens
        self._buffer: list[np.ndarray] = []
        self.buffered_tokens = 0
        self._folder = Folder(
            fspath(folder),
            vocab_size=vocab_size,
            tokenizer_fingerprint=tokenizer_fingerprint,
            create=True,
            read_only=False,
        )
        try:
            self._begin(resume)
        except BaseException:
            self._folder.close()
            raise

    def _begin(self, resume: bool) -> None:
        building, files = self._folder.manifest.building, self._files()
        if self.corpus not in building:
            if files:
                raise DatastoreError(
                    f"corpus {self.corpus!r} exists already in {self._folder.path}: delete it "
                    "first, or choose another name"
                )
            self._folder.publish(building={**building, self.corpus: None})
            return
        damaged = [file.problem for file in files if file.problem is not None]
        if damaged:
            raise DatastoreError(f"corpus {self.corpus!r} cannot be gone on with: {damaged[0]}")
        if not resume and files:
            self._folder.publish(remove=files, building={**building, self.corpus: None})

    @property
    def progress(self) -> dict[str, Any] | None:
        """What the last commit() was given; None: there was none."""
        return self._folder.manifest.building[self.corpus]

    @property
    def committed_tokens(self) -> int:
        """Tokens in files."""
        return sum(file.entry.tokens for file in self._files())

    def add(self, tokens: TokenIds) -> None:
        """Gathers one document; DatastoreError if an id is outside the vocabulary."""
        document = as_token_ids(tokens, self._folder.manifest.vocab_size - 1)
        if document.size:
            self._buffer.append(document)
            self.buffered_tokens += document.size

    def commit(self, progress: dict[str, Any]) -> None:
        """Sorts what was gathered into a file; progress (for JSON) is stored in the same step."""
        documents = (Document(tokens) for tokens in self._buffer)
        vocab_size = self._folder.manifest.vocab_size
        built = build_segments(documents, vocab_size, self._segment_tokens)
        entries = [self._write(segment) for segment in built]
        building = {**self._folder.manifest.building, self.corpus: progress}
        self._folder.publish(add=entries, building=building)
        self._buffer.clear()
        self.buffered_tokens = 0

    def finish(self) -> int:
        """Commits the rest, merges the files and makes the corpus visible; returns its tokens.

        DatastoreError if it holds nothing.
        """
        if self._buffer:
            self.commit(self.progress or {})
        files = self._files()
        if not files:
            raise DatastoreError(f"corpus {self.corpus!r} holds no tokens")
        if len(files) > 1:
            files = self._merge(files)
        building = {**self._folder.manifest.building}
        del building[self.corpus]
        self._folder.publish(building=building)
        return sum(file.entry.tokens for file in files)

    def _merge(self, files: list[SubIndexFile]) -> list[SubIndexFile]:
        """Merges neighbours into sub-indices of full size, one at a time in memory."""
        for group in self._groups(files):
            segments = [segment for file in group for _, segment in file.segments]
            merged = merge_all(segments, self._folder.manifest.vocab_size, self._segment_tokens)
            if len(merged) < len(segments):
                self._folder.publish(add=[self._write(s) for s in merged], remove=group)
        return self._files()

    def _groups(self, files: list[SubIndexFile]) -> list[list[SubIndexFile]]:
        groups: list[list[SubIndexFile]] = []
        size = 0
        for file in files:
            if not groups or size + file.entry.tokens > self._segment_tokens:
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += file.entry.tokens
        return groups

    def _write(self, segment: Segment) -> FileEntry:
        manifest = self._folder.manifest
        name = self._folder.new_file_name()
        owned = ((self.corpus, segment),)
        content = Container(manifest.vocab_size, manifest.tokenizer_fingerprint, owned)
        write_container(self._folder.file_path(name), content)
        return replace(FileEntry(name, segment.num_tokens), corpus=self.corpus)

    def _files(self) -> list[SubIndexFile]:
        return [file for file in self._folder.files if file.entry.corpus == self.corpus]

    def close(self) -> None:
        """Gives the folder back; what was not committed is lost."""
        self._folder.close()

    def __enter__(self) -> "CorpusBuilder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
