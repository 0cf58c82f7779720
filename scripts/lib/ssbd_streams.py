"""Streams of growing sources from aligned sentence files, and the file that keeps their outputs."""

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from sglang_ext.sweep.scenarios import growing

# Languages written without spaces: a source grows by characters, not by words.
_UNSPACED = frozenset({"chinese", "japanese", "thai", "lao", "khmer", "burmese"})


@dataclass(frozen=True)
class Stream:
    """One sentence that grows.

    Attributes:
        sources: what is known of it after each update; the last one is the whole sentence.
        reference: a translation of the whole sentence.
    """

    sources: tuple[str, ...]
    reference: str


@dataclass(frozen=True)
class Update:
    """One translation of one beginning of a stream's sentence.

    Attributes:
        stream: its number.
        mode: how it was decoded; a name of bench_ssbd.MODES.
        batch: streams that were translated at once.
        step: number of the stream's update, from 0.
        final: whether it is the stream's last one.
        token_ids: the output, without the end token.
        text: the same, decoded.
        tokens: tokens that were decoded, the end token included.
        seconds: from sending the request to its end.
    """

    stream: int
    mode: str
    batch: int
    step: int
    final: bool
    source: str
    token_ids: tuple[int, ...]
    text: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Settings:
    """What a results file was made with: its first line.

    Attributes:
        source: name of the file of sentences.
        template: the message to the model, with {source}, {source_language}, {target_language}.
        references: a translation of each stream's whole sentence.
    """

    model: str
    source: str
    source_language: str
    target_language: str
    lag: int
    template: str
    references: tuple[str, ...]


def write_line(file: IO[str], line: Settings | Update) -> None:
    """Append a line to a results file, and flush it."""
    file.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")
    file.flush()


def read_results(path: Path) -> tuple[Settings, list[Update]]:
    """Settings and updates of a results file.

    A last line that a killed run left unfinished is passed over.

    Raises:
        ValueError: it is no results file of bench_ssbd.
    """
    with path.open(encoding="utf-8") as file:
        lines = [line for line in file if line.endswith("\n")]
    try:
        head, *rest = map(json.loads, lines)
        settings = Settings(**{**head, "references": tuple(head["references"])})
        updates = [Update(**{**line, "token_ids": tuple(line["token_ids"])}) for line in rest]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no results file of bench_ssbd --results: {error}") from None
    return settings, updates


def by_stream(updates: Iterable[Update], mode: str, batch: int) -> dict[int, list[Update]]:
    """One mode's updates at one batch size: by stream, in order; whole streams only."""
    found: dict[int, list[Update]] = {}
    for update in updates:
        if update.mode == mode and update.batch == batch:
            found.setdefault(update.stream, []).append(update)
    ordered = {stream: sorted(found[stream], key=lambda u: u.step) for stream in sorted(found)}
    return {stream: own for stream, own in ordered.items() if own[-1].final}


def is_unspaced(language: str) -> bool:
    """Whether a language, by its English name, is written without spaces between words."""
    return language.strip().lower() in _UNSPACED


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, plain or gzipped by its name, without their ends.

    Raises:
        ValueError: the file is not UTF-8 text, or not gzipped though its name says so.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            return [line.strip() for line in file]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except gzip.BadGzipFile:
        raise ValueError(f"{path} is named .gz but is not gzipped") from None


def read_streams(
    source: Path, reference: Path, *, lag: int, count: int, by_character: bool = False
) -> list[Stream]:
    """The first `count` pairs of two aligned files in which neither line is empty.

    Raises:
        ValueError: the files differ in length, or have no such pair.
    """
    sources, references = read_lines(source), read_lines(reference)
    if len(sources) != len(references):
        raise ValueError(
            f"{source} has {len(sources)} lines and {reference} has {len(references)}: "
            "line n of one must be the translation of line n of the other"
        )
    pairs = [(s, r) for s, r in zip(sources, references, strict=True) if s and r]
    if not pairs:
        raise ValueError(f"{source} and {reference} have no pair of lines with text in both")
    return [Stream(growing(s, lag, by_character=by_character), r) for s, r in pairs[:count]]
