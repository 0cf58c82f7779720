"""What a run of captions came to: words, delays, flicker."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items two sequences have in common at their beginning."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


class Erasure:
    """Normalized erasure of lines of text that change on a screen.

    NE: words that disappeared, by words that stayed in the end (Arivazhagan et al. 2020,
    "Re-translation versus Streaming for Simultaneous Translation", section 4). Each line by itself.
    """

    def __init__(self) -> None:
        self.words = 0
        """In the lines that are final."""
        self.erased = 0
        """Words that disappeared from lines."""
        self._lines: dict[int, list[str]] = {}

    def show(self, line: int, words: Sequence[str], final: bool) -> None:
        """A line has these words now, and if `final` for ever."""
        before = self._lines.get(line, [])
        self.erased += len(before) - common_prefix(before, words)
        self._lines[line] = list(words)
        if final:
            self.words += len(self._lines.pop(line))

    @property
    def value(self) -> float:
        """NE; 0 where there are no words."""
        return self.erased / self.words if self.words else 0.0


@dataclass
class Delays:
    """Seconds from a word's end in the audio until its caption is committed."""

    seconds: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """0 where there are no words."""
        return float(np.mean(self.seconds)) if self.seconds else 0.0

    @property
    def p90(self) -> float:
        """The 90th percentile; 0 where there are no words."""
        return float(np.percentile(self.seconds, 90)) if self.seconds else 0.0


@dataclass(frozen=True)
class Summary:
    """The figures at the end.

    Attributes:
        audio_s: seconds that were played.
        words: committed in captions.
        delay_mean_s, delay_p90_s: from a word's end in the audio until its caption is committed.
        caption_ne: normalized erasure of captions, unstable words included.
        translation_words: in final translations; None where nothing is translated.
        translation_ne: normalized erasure of translations, unstable part included.
        translation_stable_ne: the same of the stable part.
        lost_s: seconds of audio that recognition was too late for.
        errors: failed requests.
    """

    audio_s: float
    words: int
    delay_mean_s: float
    delay_p90_s: float
    caption_ne: float
    translation_words: int | None
    translation_ne: float | None
    translation_stable_ne: float | None
    lost_s: float
    errors: int

    def lines(self) -> list[str]:
        """As a table for people."""
        rows = [
            ("audio", f"{self.audio_s:.1f} s"),
            ("words", f"{self.words}"),
            ("delay of captions", f"mean {self.delay_mean_s:.2f} s, p90 {self.delay_p90_s:.2f} s"),
            ("flicker of captions", f"NE {self.caption_ne:.2f}"),
        ]
        if self.translation_words is not None:
            rows += [
                ("words of translation", f"{self.translation_words}"),
                (
                    "flicker of translation",
                    f"NE {self.translation_ne:.2f}, stable part {self.translation_stable_ne:.2f}",
                ),
            ]
        if self.lost_s:
            rows.append(("lost, recognition too slow", f"{self.lost_s:.1f} s"))
        if self.errors:
            rows.append(("failed requests", f"{self.errors}"))
        return [f"{name + ':':<28}{value}" for name, value in rows]

    def record(self) -> dict[str, float | int | None]:
        """For JSON."""
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}
