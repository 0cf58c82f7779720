"""SGLang's /add_external_corpus, completed; /datastore/corpora adds a namespace to it.

SGLang reads and tokenizes a corpus on the HTTP server's event loop, which then answers nothing
else, takes lines of any length, and sends the tokens through the scheduler's own queue. Here all
of that happens beside the serving; formats, replies and the other two endpoints are SGLang's.
"""

import asyncio
import copy
import json
import os
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sglang_ext.api.datastore import protocol
from sglang_ext.api.datastore.control import ControlError
from sglang_ext.api.datastore.control_client import call_all
from sglang_ext.request_options import shown

# A longer line is hardly one document, and tokenizing it takes 100 times its size in memory.
MAX_LINE_BYTES = 16 << 20
# Sorting 10 million tokens takes seconds, with the cores busy a minute.
_LOAD_TIMEOUT_S = 600.0
# Fields that may hold the text where a line is an object.
_TEXT_FIELDS = ("text", "content")
_loading = threading.Lock()
# One thread for all: malloc keeps what a tokenizer's copy took, 40 MiB, for each that made one.
_tokenizing = ThreadPoolExecutor(1, "sglang-ext-corpora")


class CorpusError(ValueError):
    """A corpus that cannot be loaded; the message says where and why."""


async def add_external_corpus(tokenizer: Any, request: Any, max_tokens: int) -> Any:
    """Load a corpus for an AddExternalCorpusReqInput; returns an AddExternalCorpusReqOutput.

    Args:
        tokenizer: the served model's, of transformers.
        max_tokens: most tokens of a corpus (--speculative-ngram-external-corpus-max-tokens).
    """
    from sglang.srt.managers.io_struct import AddExternalCorpusReqOutput

    try:
        name, tokens, note = await asyncio.to_thread(load, tokenizer, request, max_tokens)
    except (CorpusError, ControlError) as error:
        return AddExternalCorpusReqOutput(success=False, message=str(error))
    return AddExternalCorpusReqOutput(
        success=True,
        corpus_id=name,
        message=f"Loaded corpus '{name}' with {tokens} tokens.{note}",
        loaded_token_count=tokens,
    )


def load(
    tokenizer: Any, request: Any, max_tokens: int, namespace: str | None = None
) -> tuple[str, int, str]:
    """Load a corpus; takes as long as that does.

    Args:
        tokenizer, request, max_tokens: as in `add_external_corpus`.
        namespace: whose requests alone draft from it; None: all.

    Returns:
        its name, its tokens, and a note for the client about what was left out.

    Raises:
        CorpusError: it cannot be read.
        ControlError: it is not taken.
    """
    name = request.corpus_id or uuid.uuid4().hex
    if not isinstance(name, str):
        raise CorpusError(f"corpus_id must be a string, got {shown(name)}")
    if tokenizer is None:
        raise CorpusError("the server has no tokenizer (--skip-tokenizer-init)")
    if (request.file_path is None) == (request.documents is None):
        raise CorpusError("expected either file_path or documents")
    if not _loading.acquire(blocking=False):
        raise CorpusError("another corpus is being loaded; try again when it is done")
    try:
        for info in call_all("info"):
            listed = name if namespace is None else f"{namespace}/{name}"
            if listed in info["corpora"]:
                raise CorpusError(f"corpus {listed!r} exists already; remove it first")
        texts = (
            _checked(request.documents)
            if request.documents is not None
            else read_jsonl(request.file_path)
        )
        # Cuts a list off where it is too long, as SGLang does; refuses such a file.
        refuse = request.documents is None
        tokenizing = _tokenizing.submit(_tokenized, tokenizer, texts, max_tokens, refuse)
        documents, cut = tokenizing.result()
        if not documents:
            raise CorpusError(f"corpus {name!r} holds no text")
        note = f" (truncated: exceeded {max_tokens} token limit)" if cut else ""
        return name, _hand_over(name, documents, namespace), note
    finally:
        _loading.release()


def read_jsonl(path: str) -> Iterator[tuple[str, str]]:
    """(where, text) of each line: a JSON string, or an object with a field of _TEXT_FIELDS.

    Raises:
        CorpusError: the file or a line cannot be read.
    """
    try:
        if not isinstance(path, str) or not Path(path).is_file():
            raise CorpusError(f"file_path: there is no file {shown(path)} on the server")
        with open(path, "rb") as lines:
            number = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise CorpusError(
                        f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; "
                        "split it into several documents"
                    )
                if line.strip():
                    yield f"{path}, line {number}", _text(f"{path}, line {number}", line)
    except OSError as error:
        raise CorpusError(f"file_path {shown(path)}: {error.strerror}") from None


def _text(where: str, line: bytes) -> str:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise CorpusError(f"{where}: not JSON: {error}") from None
    if isinstance(record, dict):
        found = [record[field] for field in _TEXT_FIELDS if field in record]
        if not found:
            raise CorpusError(
                f"{where}: no field {' or '.join(_TEXT_FIELDS)}; fields: {shown(list(record))}"
            )
        record = found[0]
    if not isinstance(record, str):
        raise CorpusError(
            f"{where}: expected a JSON string, or an object with a string in "
            f"{' or '.join(_TEXT_FIELDS)}"
        )
    return record


def _checked(documents: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(documents, list):
        raise CorpusError(f"documents must be a list of strings, got {shown(documents)}")
    for i, text in enumerate(documents):
        if not isinstance(text, str):
            raise CorpusError(f"documents[{i}] must be a string, got {shown(text)}")
        if len(text) > MAX_LINE_BYTES:
            raise CorpusError(
                f"documents[{i}] is longer than {MAX_LINE_BYTES >> 20} Mi characters; split it"
            )
        yield f"documents[{i}]", text


def _tokenized(
    tokenizer: Any, texts: Iterable[tuple[str, str]], max_tokens: int, refuse: bool
) -> tuple[list[np.ndarray], bool]:
    """int32[n] per document that is not empty, and whether they were cut off at max_tokens."""
    # A copy: the tokenizer's own settings change while it serves requests in another thread.
    tokenizer = copy.deepcopy(tokenizer)
    documents: list[np.ndarray] = []
    total = 0
    for where, text in texts:
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        total += len(ids)
        if total > max_tokens:
            if refuse:
                raise CorpusError(
                    f"{where}: the corpus has more than {max_tokens} tokens "
                    "(--speculative-ngram-external-corpus-max-tokens); build large ones with "
                    "`sglang-ext datastore build`"
                )
            return documents, True
        if len(ids):
            documents.append(ids)
    return documents, False


def _hand_over(name: str, documents: Sequence[np.ndarray], namespace: str | None) -> int:
    handle, path = tempfile.mkstemp(dir=protocol.folder(), suffix=".npz")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                tokens=np.concatenate(documents),
                ends=np.cumsum([len(d) for d in documents]),
            )
        asked = {"corpus": name, "file": path, "namespace": namespace}
        results = call_all("add_corpus", _LOAD_TIMEOUT_S, **asked)
        return results[0]["tokens"]
    except OSError as error:
        raise CorpusError(f"no room for the corpus in {protocol.folder()}: {error}") from None
    finally:
        os.unlink(path)
