"""What a recogniser found in a window, word by word: where each ends, and how far it looks."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from speech.agreement import split_words


@dataclass(frozen=True)
class Span:
    """Text that the recogniser found between two times; seconds of the window.

    Attributes:
        looks: of each token, in order, how many characters of the text end with it and the second
            of the window that it attends to most; empty: not known.
    """

    start: float
    end: float
    text: str
    looks: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Word:
    """A word with the space before it.

    Attributes:
        end: where it ends, in seconds of the audio, interpolated by characters between the times
            of its span.
        look: the last second of the audio that a token of it attends to most, the punctuation that
            it ends with left out; None: not known.
    """

    text: str
    end: float
    look: float | None = None


def timed_words(spans: Sequence[Span], offset: float) -> tuple[list[Word], list[tuple[int, float]]]:
    """The words of spans, and of each span how many words there are up to it and where it ends."""
    words: list[Word] = []
    ends: list[tuple[int, float]] = []
    for span in spans:
        texts = split_words(span.text)
        length, done = sum(map(len, texts)), 0
        # Without a space of its own the first word got one.
        added = int(bool(texts) and not span.text.startswith(texts[0]))
        for text in texts:
            first, done = done - added, done + len(text)
            letters = done - added - len(_mark(text))
            look = _look(span, max(first, 0), letters)
            end = offset + span.start + (span.end - span.start) * done / length
            words.append(Word(text, end, None if look is None else offset + look))
        ends.append((len(words), offset + span.end))
    return words, ends


def parted(word: Word) -> tuple[Word, Word | None]:
    """A word without the punctuation that it ends with, and that; None: there is none, or nothing
    else."""
    mark = _mark(word.text)
    bare = word.text.removesuffix(mark)
    if not mark or not bare.strip():
        return word, None
    return replace(word, text=bare), replace(word, text=mark)


def _mark(text: str) -> str:
    """The punctuation that a text ends with."""
    end = len(text)
    while end and unicodedata.category(text[end - 1])[0] == "P":
        end -= 1
    return text[end:]


def _look(span: Span, first: int, last: int) -> float | None:
    """The last second of the window that a token with characters from `first` to `last` attends
    to; None: not known."""
    starts = (0, *(end for end, _ in span.looks))
    seconds = (
        second
        for start, (end, second) in zip(starts, span.looks, strict=False)
        if start < last and end > first
    )
    return max(seconds, default=None)
