"""Captions and translations on a terminal, as lines, and as JSON lines."""

import itertools
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.cells import cell_len

from sglang_ext.api.translation.sentence_translations import Translated
from sglang_ext.captions.session_summary import Summary
from speech.sentences import Sentence

_LIVE_SENTENCES = 4
_DIM, _PLAIN, _ERASE_BELOW = "\x1b[2m", "\x1b[22m", "\x1b[0J"


class DisplayError(Exception):
    """Captions cannot be shown; the message says why."""


@dataclass(frozen=True)
class Moment:
    """When something happened.

    Attributes:
        seconds: since the audio began to play.
        audio_s: seconds of audio that were played by then.
    """

    seconds: float
    audio_s: float


class Display(Protocol):
    """Where captions are shown."""

    def caption(self, sentence: Sentence, now: Moment) -> None:
        """A sentence is new or has changed; without text it is no longer there."""
        ...

    def translation(self, translated: Translated, now: Moment) -> None:
        """A translation is new or has changed."""
        ...

    def error(self, message: str, now: Moment) -> None:
        """A request failed and will be made again."""
        ...

    def close(self, summary: Summary) -> None:
        """It is over."""
        ...


class Terminal:
    """The sentences that change, redrawn in place; complete ones scroll up. Unstable text is dim.

    Args:
        translated: whether a sentence is complete only with its translation.
    """

    def __init__(self, out: TextIO, translated: bool):
        self._out = out
        self._translated = translated
        self._live: dict[int, tuple[Sentence | None, Translated | None]] = {}
        self._rows = 0  # that are redrawn

    def caption(self, sentence: Sentence, now: Moment) -> None:
        if sentence.text:
            self._live[sentence.index] = (sentence, self._of(sentence.index)[1])
        else:
            self._live.pop(sentence.index, None)
        self._draw([])

    def translation(self, translated: Translated, now: Moment) -> None:
        if translated.index in self._live:
            self._live[translated.index] = (self._of(translated.index)[0], translated)
        self._draw([])

    def error(self, message: str, now: Moment) -> None:
        self._draw([_printable(message)])

    def close(self, summary: Summary) -> None:
        left = [line for entry in self._live.values() for line in _full(*entry)]
        self._live.clear()
        self._draw([*left, "", *summary.lines()])

    def _of(self, index: int) -> tuple[Sentence | None, Translated | None]:
        return self._live.get(index, (None, None))

    def _draw(self, lines: list[str]) -> None:
        """Print lines that stay and all that is complete, and below them what changes."""
        while self._live and self._complete(*self._live[min(self._live)]):
            lines = lines + _full(*self._live.pop(min(self._live)))
        width = max(8, shutil.get_terminal_size().columns - 1)
        shown = [entry for _, entry in sorted(self._live.items())][-_LIVE_SENTENCES:]
        rows = [row for entry in shown for row in _rows(*entry, width)]
        up = f"\x1b[{self._rows}F" if self._rows else ""
        self._rows = len(rows)
        self._out.write(f"{up}\r{_ERASE_BELOW}" + "".join(f"{row}\n" for row in lines + rows))
        self._out.flush()

    def _complete(self, sentence: Sentence | None, translated: Translated | None) -> bool:
        if sentence is None or not sentence.final:
            return False
        return not self._translated or (translated is not None and translated.final)


class Lines:
    """A line with a time stamp for each change; unstable text stands in [brackets].

    Args:
        errors: where errors go; default: standard error.
    """

    def __init__(self, out: TextIO, errors: TextIO | None = None):
        self._out = out
        self._errors = errors or sys.stderr
        self._last: dict[tuple[str, int], str] = {}

    def caption(self, sentence: Sentence, now: Moment) -> None:
        self._line("caption", sentence.index, sentence.committed, sentence.unstable, now)

    def translation(self, translated: Translated, now: Moment) -> None:
        self._line("translation", translated.index, translated.stable, translated.unstable, now)

    def error(self, message: str, now: Moment) -> None:
        print(f"{_clock(now.seconds)} {_printable(message)}", file=self._errors, flush=True)

    def close(self, summary: Summary) -> None:
        print("", *summary.lines(), sep="\n", file=self._out, flush=True)

    def _line(self, name: str, index: int, stable: str, unstable: str, now: Moment) -> None:
        loose = f"[{unstable.strip()}]" if unstable.strip() else ""
        space = " " if loose and stable and (stable + unstable)[len(stable)].isspace() else ""
        text = _printable(stable + space + loose)
        if self._last.get((name, index), "") != text:
            self._last[name, index] = text
            print(f"{_clock(now.seconds)} {name} {index + 1}: {text}", file=self._out, flush=True)


class JsonLines:
    """Every update as a JSON object on a line of a file.

    Raises:
        DisplayError: the file cannot be written.
    """

    def __init__(self, path: Path):
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise DisplayError(f"{path}: {error.strerror}") from None

    def caption(self, sentence: Sentence, now: Moment) -> None:
        self._write(
            "caption", now, sentence=sentence.index, committed=sentence.committed,
            unstable=sentence.unstable, final=sentence.final,
        )  # fmt: skip

    def translation(self, translated: Translated, now: Moment) -> None:
        self._write(
            "translation", now, sentence=translated.index, stable=translated.stable,
            unstable=translated.unstable, final=translated.final,
        )  # fmt: skip

    def error(self, message: str, now: Moment) -> None:
        self._write("error", now, message=message)

    def close(self, summary: Summary) -> None:
        record = {"type": "summary", **summary.record()}
        with self._file:
            self._file.write(json.dumps(record) + "\n")

    def _write(self, kind: str, now: Moment, **values: Any) -> None:
        record = {"type": kind, "seconds": round(now.seconds, 3), "audio_s": round(now.audio_s, 3)}
        self._file.write(json.dumps(record | values, ensure_ascii=False) + "\n")
        self._file.flush()


def _full(sentence: Sentence | None, translated: Translated | None) -> list[str]:
    texts = [sentence.text if sentence else "", translated.text if translated else ""]
    return [_printable(mark + text) for mark, text in zip(("", "  "), texts, strict=True) if text]


def _rows(sentence: Sentence | None, translated: Translated | None, width: int) -> list[str]:
    rows = [_row("", sentence.committed, sentence.unstable, width)] if sentence else []
    if translated and translated.text:
        rows.append(_row("  ", translated.stable, translated.unstable, width))
    return rows


def _row(mark: str, stable: str, unstable: str, width: int) -> str:
    """One row of the terminal: the end of a text that is too long for it."""
    text = _printable(stable + unstable)
    cells = list(itertools.accumulate(map(cell_len, reversed(text))))
    fits = sum(count <= width - len(mark) for count in cells)
    if fits < len(text):
        mark, fits = mark + "…", max(0, sum(count < width - len(mark) for count in cells))
    first = len(text) - fits
    plain, dim = text[first : max(first, len(stable))], text[max(first, len(stable)) :]
    return mark + plain + (f"{_DIM}{dim}{_PLAIN}" if dim else "")


def _printable(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def _clock(seconds: float) -> str:
    tenths = int(seconds * 10)
    return f"{tenths // 600:02d}:{tenths % 600 / 10:04.1f}"
