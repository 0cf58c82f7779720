"""From a line, a row or a field's value to a document."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..config import DatastoreError
from ..input_trie import as_token_ids
from .source import ReadOptions, SourceError


def decoded(data: bytes, where: str) -> str | SourceError:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        wrong = data[error.start]
        return SourceError(
            f"{where}: expected UTF-8, found byte 0x{wrong:02x} at {error.start}: convert the file"
        )


def json_content(line: bytes, where: str, options: ReadOptions) -> str | np.ndarray | SourceError:
    text = decoded(line, where)
    if isinstance(text, SourceError):
        return text
    if not text.strip():
        return ""
    try:
        row = json.loads(text)
    except RecursionError:
        return SourceError(f"{where}: the JSON is nested too deeply")
    except ValueError as error:
        return SourceError(f"{where}: expected a JSON object, got {_excerpt(text)}: {error}")
    if not isinstance(row, dict):
        return SourceError(f"{where}: expected a JSON object, got {_excerpt(text)}")
    return row_content(row, where, options)


def _excerpt(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 40 else text[:37] + "...")


def row_content(
    row: Mapping[str, Any], where: str, options: ReadOptions
) -> str | np.ndarray | SourceError:
    parts: list[str] = []
    for field in options.fields:
        try:
            value = _value_of(row, field)
        except KeyError:
            return SourceError(f"{where}: {no_field('field', field, row)}")
        part = _value_content(value, options.vocab_size)
        if isinstance(part, DatastoreError):
            return SourceError(f"{where}: field {field!r} {part}")
        if isinstance(part, str):
            parts.append(part)
        elif len(options.fields) == 1:
            return part
        else:
            return SourceError(f"{where}: field {field!r} holds token ids; name that field only")
    return "\n".join(parts)


def no_field(kind: str, field: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    names = ", ".join(map(repr, list(known)[:20])) or "none"
    return f"there is no {kind} {field!r}; there are: {names} (choose with --field)"


def _value_of(row: Mapping[str, Any], field: str) -> Any:
    """row["a"]["b"] for "a.b", unless the row has a key "a.b". KeyError if it is not there."""
    if field in row:
        return row[field]
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(field)
        value = value[name]
    return value


def _value_content(value: Any, vocab_size: int) -> str | np.ndarray | DatastoreError:
    """A text, token ids, or what the value is instead."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return DatastoreError("holds half of a surrogate pair, which is no character")
        return value
    if isinstance(value, list) and not value:
        return ""
    if isinstance(value, list) and all(type(item) is int for item in value):
        try:
            return as_token_ids(np.array(value, np.int64), vocab_size - 1)
        except OverflowError:
            return DatastoreError(f"holds a token id outside 0..{vocab_size - 1}, the vocabulary")
        except DatastoreError as error:
            return DatastoreError(f"is no list of tokens: {error}")
    if isinstance(value, list):
        return _chat_content(value)
    kind = "null" if value is None else type(value).__name__
    return DatastoreError(f"is {kind}, expected a text, chat messages or token ids")


def _chat_content(messages: list[Any]) -> str | DatastoreError:
    """What was said in a chat, without roles: these are not what a model is asked to write."""
    texts: list[str] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
            elif not (isinstance(message, dict) and "content" in message):
                return DatastoreError(f'[{i}] is no message: expected {{"role", "content"}}')
    return DatastoreError("has no text in its messages") if not texts else _joined(texts)


def _joined(texts: list[str]) -> str | DatastoreError:
    found = _value_content("\n\n".join(texts), 0)
    assert not isinstance(found, np.ndarray)
    return found
