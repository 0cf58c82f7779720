"""Two Whisper vocabularies, and the text between them.

Tokens are byte strings; special tokens (<|en|>, <|0.02|>, <|endoftext|>, ...) have names. Where the
text tokens of both models are the same (tiny.en and medium.en, tiny and large-v3) ids are mapped
one by one. Where they differ it is not enough to map token by token: tiny.en writes
" comparatively" as one token and base as " compar" + "atively", and a draft model that is handed
the latter never saw it so. Text is therefore spelled anew, word by word, in the tokens that each
model would have used itself.
"""

import functools
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# GPT-2's pre-tokenizer (openai/gpt-2, encoder.py), which both vocabularies were made with; re has
# no \p{L}, and marks and exotic digits fall among the letters here: a draft need not be exact.
_WORD = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:_|[^\s\w])+|\s+(?!\S)|\s+",
)
_NEVER = 1 << 30
_GPT2_END = 50_256
# Whisper's tokenizers name these two by one name or the other.
_SAME_NAMES = {"<|nospeech|>": "<|nocaptions|>", "<|he|>": "<|iw|>"}


@functools.cache
def byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): byte for byte in printable}
    return chars | {chr(256 + i): byte for i, byte in enumerate(others)}


def words(text: bytes) -> list[bytes]:
    """`text` cut where a byte-level BPE never joins across."""
    decoded = text.decode("utf-8", "surrogateescape")
    return [word.encode("utf-8", "surrogateescape") for word in _WORD.findall(decoded)]


class Vocabulary:
    """One model's tokens.

    Attributes:
        bytes_of: the byte string of each text token; None for special tokens and unused ids.
        special: ids of the special tokens by name.
        end: the id of <|endoftext|>.
        is_multilingual: False for GPT-2's vocabulary, which English-only Whispers have.
    """

    def __init__(
        self,
        vocab: Mapping[str, int],
        special: Mapping[str, int],
    ) -> None:
        """
        Args:
            vocab: ids by token, in GPT-2's printable characters; may hold the special ones too.
                Ids are in the order in which BPE merged, as they are in every Whisper's.
            special: ids by name.
        """
        self.special = {_SAME_NAMES.get(name, name): token for name, token in special.items()}
        self.end = self.special["<|endoftext|>"]
        self.is_multilingual = self.end != _GPT2_END
        size = 1 + max(max(vocab.values(), default=0), max(special.values()))
        self.bytes_of: list[bytes | None] = [None] * size
        known = byte_of_char()
        reserved = set(special.values())
        for token, index in vocab.items():
            if index not in reserved and all(char in known for char in token):
                self.bytes_of[index] = bytes(known[char] for char in token)
        self.name_of = {token: name for name, token in self.special.items()}
        self._rank = {text: i for i, text in enumerate(self.bytes_of) if text is not None}
        self.spell = functools.lru_cache(maxsize=65536)(self._spell)

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        """Read it from a transformers fast tokenizer or a `tokenizers.Tokenizer`."""
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        content = json.loads(backend.to_str())
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        return cls(backend.get_vocab(with_added_tokens=False), special)

    @classmethod
    def load(cls, folder: Path | str) -> "Vocabulary":
        """Read it from a model folder's tokenizer.json.

        Raises:
            ValueError: there is none, or it is not a Whisper's.
        """
        from tokenizers import Tokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json; the draft model needs its own")
        try:
            return cls.of(Tokenizer.from_file(str(path)))
        except KeyError as error:
            raise ValueError(f"{path} is not a Whisper tokenizer: no {error} in it") from None

    def _spell(self, word: bytes) -> tuple[int, ...]:
        """BPE: of the neighbours that join to a token, those with the lowest id join first."""
        parts = [word[i : i + 1] for i in range(len(word))]
        while len(parts) > 1:
            ranks = [self._rank.get(a + b, _NEVER) for a, b in itertools.pairwise(parts)]
            first = min(ranks)
            if first == _NEVER:
                break
            i = ranks.index(first)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return tuple(self._rank[part] for part in parts)

    def key(self, token: int) -> bytes | int:
        """What tokens share that differ by case and white space only."""
        text = self.bytes_of[token]
        return token if text is None else text.strip().lower()

    def spell_text(self, text: bytes) -> list[int]:
        """The tokens that this model's tokenizer makes of `text`."""
        return [token for word in words(text) for token in self.spell(word)]


class Vocabularies:
    """A target's and a draft model's vocabulary, and what maps one by one between them.

    Attributes:
        direct: text tokens are the same: ids are mapped one by one.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target = target
        self.draft = draft
        count = min(target.end, draft.end)
        self.direct = target.bytes_of[:count] == draft.bytes_of[:count]
        self._to_draft = {
            token: draft.special[name]
            for name, token in target.special.items()
            if name in draft.special
        }
        self._to_target = {own: token for token, own in self._to_draft.items()}

    def special_to_draft(self, token: int) -> int | None:
        """The draft model's id of a special token of the target's; None: it has none."""
        return self._to_draft.get(token)

    def special_to_target(self, token: int) -> int | None:
        """The target's id of a special token of the draft model's; None: it has none."""
        return self._to_target.get(token)
