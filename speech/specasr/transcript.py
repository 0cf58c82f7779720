"""What the target has committed, as the draft model would have written it."""

from collections.abc import Sequence

from speech.specasr.vocabulary import Vocabularies, words

_START = "<|startoftranscript|>"
_PREVIOUS = "<|startofprev|>"
_TASKS = ("<|transcribe|>", "<|translate|>")
_ENGLISH = "<|en|>"


class Transcript:
    """A request's prompt and output in the draft model's tokens, kept up to date.

    Text is spelled anew word by word (vocabulary.py), so the last word stays open: `tail` holds it
    until the next one begins. With equal vocabularies tokens map one by one and `tail` is empty.

    Attributes:
        tokens: the draft model's tokens of all but the open word.
        tail: bytes of the open word.
        tail_tokens: the target's tokens of the open word; None if one of them began before it.
        can_draft: False where the draft model has no business: a language it does not know.
    """

    def __init__(self, vocabularies: Vocabularies, prompt: Sequence[int]) -> None:
        self._vocabularies = vocabularies
        self.tokens: list[int] = []
        self.tail = b""
        self.tail_tokens: list[int] | None = []
        self.can_draft = True
        target = vocabularies.target
        self._start = target.special[_START]
        self.append(_decoder_prompt(prompt, self._start, target.special.get(_PREVIOUS)))

    def append(self, tokens: Sequence[int]) -> None:
        """The target has committed `tokens`, its own."""
        for token in tokens:
            text = self._text(token)
            if text is None:
                self._close()
                self._append_special(token)
            elif self._vocabularies.direct:
                self.tokens.append(token)
            else:
                self._append_text(token, text)

    def spelled(self) -> list[int]:
        """The whole, in the draft model's tokens; the open word is spelled as if it were whole."""
        if not self.tail:
            return list(self.tokens)
        return self.tokens + self._vocabularies.draft.spell_text(self.tail)

    def _text(self, token: int) -> bytes | None:
        known = self._vocabularies.target.bytes_of
        return known[token] if 0 <= token < len(known) else None

    def _append_text(self, token: int, text: bytes) -> None:
        whole = self.tail + text
        parts = words(whole)
        if len(parts) > 1:
            for word in parts[:-1]:
                self.tokens += self._vocabularies.draft.spell(word)
            held, whole = whole, parts[-1]
            begins_here = len(held) - len(whole) == len(self.tail)
            self.tail_tokens = [token] if begins_here else None
        elif self.tail_tokens is not None:
            self.tail_tokens.append(token)
        self.tail = whole

    def _close(self) -> None:
        self.tokens = self.spelled()
        self.tail, self.tail_tokens = b"", []

    def _append_special(self, token: int) -> None:
        vocabularies = self._vocabularies
        name = vocabularies.target.name_of.get(token)
        language = _is_language(name)
        if not vocabularies.draft.is_multilingual and (language or name in _TASKS):
            # English-only models have no such prompt; of another language they know nothing.
            self.can_draft &= not language or name == _ENGLISH
            return
        mapped = vocabularies.special_to_draft(token)
        if mapped is not None:
            self.tokens.append(mapped)
        else:
            self.can_draft &= not language
        if token == self._start and not vocabularies.target.is_multilingual:
            self._add_english()

    def _add_english(self) -> None:
        """What an English-only target's prompt leaves out and a multilingual draft's needs."""
        draft = self._vocabularies.draft
        if draft.is_multilingual:
            self.tokens += [draft.special[_ENGLISH], draft.special[_TASKS[0]]]


def _decoder_prompt(prompt: Sequence[int], start: int, previous: int | None) -> list[int]:
    """The prompt without what SGLang puts in front of it (a placeholder per encoder position)."""
    tokens = list(prompt)
    for first in (previous, start):
        if first in tokens:
            return tokens[tokens.index(first) :]
    return tokens


def _is_language(name: str | None) -> bool:
    """<|en|>, <|haw|>: the only special tokens of two or three letters."""
    return name is not None and name.startswith("<|") and name[2:-2].isalpha() and len(name) <= 7
