"""The served model's tokenizer, without the model."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from datastores import DatastoreError
from datastores.sources import cut_point
from sglang_ext.models import resolve
from sglang_ext.models.tokenizers import fingerprint

# Longer texts are tokenized in pieces: in parallel, and in bounded memory.
PIECE_BYTES = 1 << 17


class ModelTokenizer:
    """Turns texts into the token ids that the server sees; fingerprint and vocab_size as there."""

    def __init__(self, model: str, vocab_size: int | None = None) -> None:
        """model: a name of `sglang-ext models list`, a path or a hub id.

        vocab_size: None takes it from the model's config.json, as the server does.
        Raises ModelError (unknown name), DatastoreError (no tokenizer, or no vocabulary size).
        """
        path = resolve(model)
        tokenizer = _load(model, path)
        self.vocab_size = vocab_size or _vocab_size(model, path)
        self.fingerprint = fingerprint(tokenizer)
        self._slow = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32[n] per text, without special tokens of its own."""
        pieces = [_pieces(text) for text in texts]
        encoded = iter(self._encode([piece for group in pieces for piece in group]))
        return [
            np.concatenate([np.array(next(encoded), np.int32) for _ in group]) for group in pieces
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._slow.decode(list(tokens), clean_up_tokenization_spaces=False)

    def _encode(self, pieces: list[str]) -> list[list[int]]:
        if self._fast is None:
            return self._slow(pieces, add_special_tokens=False)["input_ids"]
        encoded = self._fast.encode_batch_fast(pieces, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]


def _pieces(text: str) -> list[str]:
    if len(text) <= PIECE_BYTES:
        return [text]
    data, pieces, at = text.encode(), [], 0
    while at < len(data):
        block = data[at : at + PIECE_BYTES]
        size = cut_point(block) if at + PIECE_BYTES < len(data) else len(block)
        pieces.append(block[:size].decode())
        at += size
    return pieces


def _load(model: str, path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of many kinds: no files, no network, a damaged JSON
        reason = " ".join(str(error).split())[:200]
        raise DatastoreError(f"--tokenizer {model}: no tokenizer can be loaded: {reason}") from None


def _vocab_size(model: str, path: str) -> int:
    from transformers import AutoConfig
    from transformers.utils import cached_file

    try:
        return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)
    except Exception:  # a model that transformers does not know; SGLang may
        pass
    try:
        with open(cached_file(path, "config.json"), encoding="utf-8") as file:  # type: ignore
            config = json.load(file)
        return int(config.get("text_config", config)["vocab_size"])
    except Exception:
        raise DatastoreError(
            f"--tokenizer {model}: its config.json names no vocab_size; give the served model's "
            "with --vocab-size"
        ) from None
