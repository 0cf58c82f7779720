"""What Whisper's decoder is given before it writes, and the languages it knows.

Prompt: [<|startofprev|> earlier text] <|startoftranscript|> [language task] and <|notimestamps|>
or <|0.00|> (Radford et al. 2022, figure 1; openai-whisper's decoding.py). English-only models take
neither language nor task.
"""

from collections.abc import Sequence
from functools import cache, cached_property

from whisper.tokenizer import LANGUAGES, TO_LANGUAGE_CODE, Tokenizer, get_tokenizer

TASKS = ("transcribe", "translate")
GRANULARITIES = ("segment", "word")
"""What can have times, as OpenAI's API names it."""

TIMESTAMP_S = 0.02
"""Seconds from one timestamp token to the next."""

SPACELESS = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that are written without spaces between words (openai-whisper's tokenizer.py)."""

_MULTILINGUAL_VOCABULARY = 51_865  # English-only models have a token less
_OTHER_TOKENS = 51_765  # in a vocabulary that are no languages


class LanguageError(ValueError):
    """The language is unknown, or the model does not speak it."""


class WhisperVocabulary:
    """The tokens of a Whisper model.

    Args:
        size: the model's vocab_size, which tells OpenAI's vocabularies apart.

    Raises:
        ValueError: no Whisper model has so many tokens.
    """

    def __init__(self, size: int):
        self.multilingual = size >= _MULTILINGUAL_VOCABULARY
        count = size - _OTHER_TOKENS - int(self.multilingual)
        if not 99 <= count <= len(LANGUAGES):
            raise ValueError(f"vocab_size {size} is not one of OpenAI's Whisper models")
        self._count = count
        self.tokenizer: Tokenizer = _tokenizer(self.multilingual, count, None, None)
        self.end: int = self.tokenizer.eot
        self.start: int = self.tokenizer.sot
        self.no_speech: int = self.tokenizer.no_speech
        self.first_timestamp: int = self.tokenizer.timestamp_begin

    @cached_property
    def languages(self) -> dict[str, int]:
        """Language tokens by ISO code; English alone where the model has no other."""
        codes = list(LANGUAGES)[: self._count] if self.multilingual else ["en"]
        return {code: self.tokenizer.special_tokens[f"<|{code}|>"] for code in codes}

    def language_code(self, language: str) -> str:
        """The ISO code of a language given as code or English name, in any case.

        Raises:
            LanguageError: the model does not know it.
        """
        name = language.strip().lower()
        code = name if name in LANGUAGES else TO_LANGUAGE_CODE.get(name)
        if code is None:
            raise LanguageError(
                f"unknown language {language[:40]!r}: expected an ISO-639-1 code such as 'en', or "
                "an English name such as 'english'"
            )
        if code not in self.languages:
            known = "only English" if not self.multilingual else f"{self._count} others"
            raise LanguageError(f"this model does not know {LANGUAGES[code]}; it knows {known}")
        return code

    def prompt(
        self,
        language: str = "en",
        task: str = "transcribe",
        *,
        timestamps: bool = False,
        previous: str = "",
        context: int = 448,
    ) -> list[int]:
        """The decoder's prompt.

        Args:
            language: ISO code.
            task: one of TASKS.
            timestamps: ends with <|0.00|> rather than <|notimestamps|>.
            previous: text that might have come before; its last tokens are used, up to half of
                the context.
            context: the model's max_target_positions.
        """
        special = self.tokenizer.special_tokens
        ids = self._previous(previous, context)
        ids.append(self.start)
        if self.multilingual:
            ids += [self.languages[language], special[f"<|{task}|>"]]
        ids.append(self.first_timestamp if timestamps else special["<|notimestamps|>"])
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones; broken UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode([t for t in tokens if t < self.end])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        return self.tokenizer.encoding.decode_single_token_bytes(token)

    def for_language(self, language: str, task: str) -> Tokenizer:
        """openai-whisper's tokenizer for a language and task."""
        return _tokenizer(self.multilingual, self._count, language, task)

    def _previous(self, text: str, context: int) -> list[int]:
        if not text.strip():
            return []
        # Names of special tokens in it are text like any other.
        ids = self.tokenizer.encode(" " + text.strip(), disallowed_special=())
        return [self.tokenizer.sot_prev, *ids[-(context // 2 - 1) :]]


@cache
def _tokenizer(multilingual: bool, count: int, language: str | None, task: str | None) -> Tokenizer:
    return get_tokenizer(multilingual, num_languages=count, language=language, task=task)


def language_name(code: str) -> str:
    """The English name of an ISO code, as OpenAI's API writes it: 'english'."""
    return LANGUAGES[code]
