"""What a recogniser found in a window, word by word: where each ends, and how far it looks."""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from speech.agreement import split_words

# A word that attends to a place so far before an earlier one was not written from the audio:
# invented text looks back (SimulStreaming's rewind_threshold, which is 4 s).
REWIND_S = 1.0
_SURE = -0.25  # log probability
_BEHIND_S = 0.1  # a word's place may lie so far behind the end of speech
_LEAST_INVENTED = 3  # words: of fewer, attention may be wrong
_LEAST_WORD_S = 0.15  # nobody says several words in less, each


class Token(NamedTuple):
    """A token of a span.

    Attributes:
        end: so many characters of the text end with it.
        look: the second of the window that it attends to most; nan: not known.
        logprob: log probability, natural; nan: not known.
    """

    end: int
    look: float = math.nan
    logprob: float = math.nan


@dataclass(frozen=True)
class Span:
    """Text that the recogniser found between two times; seconds of the window.

    Attributes:
        tokens: in order; empty: not known.
    """

    start: float
    end: float
    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Word:
    """A word with the space before it.

    Attributes:
        end: where it ends, in seconds of the audio, interpolated by characters between the times
            of its span.
        look: the last second of the audio that a token of it attends to most, the punctuation that
            it ends with left out; None: not known.
        logprob: the least of these tokens' log probabilities; None: not known.
    """

    text: str
    end: float
    look: float | None = None
    logprob: float | None = None


def is_sure(logprob: float | None) -> bool:
    """Whether a word's log probability tells that it will not change; None: nothing tells of it."""
    return logprob is None or logprob >= _SURE


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
            tokens = _tokens(span, max(first, 0), letters)
            look = max(_known(token.look for token in tokens), default=None)
            logprob = min(_known(token.logprob for token in tokens), default=None)
            end = offset + span.start + (span.end - span.start) * done / length
            words.append(Word(text, end, None if look is None else offset + look, logprob))
        ends.append((len(words), offset + span.end))
    return words, ends


def without_invented(words: Sequence[Word], spoken: float) -> list[Word]:
    """The words without an end that Whisper wrote from no sound.

    Where speech has ended, a decoder may go on with what often follows in its training ("you can
    find the link in the description"). Such words attend to where speech was before, to where it
    is over, or all to one place, as <|endoftext|> does; and no time is left in which they could
    have been said.

    Args:
        words: of a hypothesis; where nothing is known of their places, all of them stay.
        spoken: where speech ends, in seconds of the audio.
    """
    known, kept, far = False, 0, -math.inf
    for count, word in enumerate(words, 1):
        if word.look is None:
            continue
        known = True
        if far - REWIND_S <= word.look < spoken + _BEHIND_S:
            kept, far = count, max(far, word.look)
    rest = len(words) - kept
    # The last word that stays takes its time, too.
    late = spoken - far < (rest + 1) * _LEAST_WORD_S
    invented = known and rest >= _LEAST_INVENTED and late
    return list(words[:kept] if invented else words)


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


def _tokens(span: Span, first: int, last: int) -> list[Token]:
    """The tokens with characters from `first` to `last`."""
    starts = (0, *(token.end for token in span.tokens))
    return [
        token
        for start, token in zip(starts, span.tokens, strict=False)
        if start < last and token.end > first
    ]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
