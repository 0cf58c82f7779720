"""What a translation session says: sentences as they are spoken, and texts that only grow."""

from collections.abc import Sequence
from dataclasses import dataclass

from speech.agreement import space_before, split_words
from speech.sentences import Sentence, Sentences


@dataclass(frozen=True)
class Spoken:
    """A sentence, as far as it is settled.

    Attributes:
        index: its number, from 0.
        text: will not change, but may grow.
        final: whether it is complete.
        item_id: the item that it is part of.
        language: ISO code of what it is spoken in.
        ends_ms: where its words end, in milliseconds of the session's audio.
    """

    index: int
    text: str
    final: bool
    item_id: str
    language: str
    ends_ms: tuple[int, ...]

    @property
    def settled(self) -> Sentence:
        """The same without its place."""
        return Sentence(self.index, self.text, "", self.final)

    def end_ms(self, text: str) -> int:
        """Where a beginning of it ends."""
        words = min(len(split_words(text)), len(self.ends_ms))
        return self.ends_ms[words - 1] if words else 0


class SpokenSentences:
    """Divides what is settled of the items, one after the other, into sentences.

    A sentence ends with its item: a pause parts them.
    """

    def __init__(self) -> None:
        self._sentences = Sentences()
        self._spoken: dict[int, Spoken] = {}
        self._ends_ms: list[int] = []  # of the settled words of sentences that are not complete
        self._language = "en"

    def update(
        self, item_id: str, language: str | None, words: Sequence[tuple[str, int]], tail: str
    ) -> list[Spoken]:
        """Take words that are settled now.

        Args:
            language: ISO code; None: as before.
            words: with the space before each, and where each ends, in milliseconds.
            tail: what may follow them, which tells whether a sentence goes on.

        Returns:
            The sentences with settled words that this changed, in order.
        """
        self._language = language or self._language
        self._ends_ms += [end for _, end in words]
        changed = self._sentences.update([word for word, _ in words], split_words(tail))
        return self._placed(item_id, changed)

    def end_item(self, item_id: str) -> list[Spoken]:
        """No more words of the item will come; what changed, as from `update`."""
        changed = self._placed(item_id, self._sentences.end())
        self._ends_ms.clear()
        return changed

    def get(self, index: int) -> Spoken | None:
        """A sentence that was not forgotten."""
        return self._spoken.get(index)

    def forget(self, index: int) -> None:
        """A sentence needs not be known any more."""
        self._spoken.pop(index, None)

    def _placed(self, item_id: str, changed: Sequence[Sentence]) -> list[Spoken]:
        found, start = [], 0
        for sentence in changed:
            if not sentence.committed:
                continue
            words = len(split_words(sentence.committed))
            ends = tuple(self._ends_ms[start : start + words])
            if sentence.final:
                del self._ends_ms[: start + words]
                start = 0
            else:
                start += words
            spoken = Spoken(
                sentence.index, sentence.committed, sentence.final, item_id, self._language, ends
            )
            self._spoken[sentence.index] = spoken
            found.append(spoken)
        return found


class Transcript:
    """A text of which what was said stays, made of parts one after the other."""

    def __init__(self) -> None:
        self._part: object = None
        self._said = ""  # of the part

    def grown(self, part: object, text: str) -> str:
        """The next text of a part, with the space before it where the part is new.

        Args:
            part: names it; what came for another one before is complete.
        """
        if part == self._part:
            self._said += text
            return text
        space = self.space(part, text)
        self._part, self._said = part, text
        return space + text

    def space(self, part: object, text: str) -> str:
        """The space between what was said and a text that follows it in a part."""
        follows = part == self._part or self._part is None
        return "" if follows else space_before(text)

    def shown(self, part: object, text: str, final: bool) -> str:
        """What is new of a part, given all of it.

        A text that begins otherwise than it did (a text server that lost its session) follows
        once it is final: as much of it as was not said, by words.
        """
        said = self._said if part == self._part else ""
        if text.startswith(said):
            rest = text[len(said) :]
        elif final:
            rest = "".join(split_words(text)[len(split_words(said)) :])
        else:
            rest = ""
        return self.grown(part, rest) if rest else ""
