"""Telling tokenizers apart, so that no stored tokens are read with another's vocabulary."""

import hashlib
from typing import Any


def fingerprint(tokenizer: Any) -> str:
    """A short hash of a tokenizer's vocabulary; "" where there is no tokenizer.

    Args:
        tokenizer: anything with transformers' `get_vocab()`.
    """
    vocab = getattr(tokenizer, "get_vocab", None)
    if vocab is None:
        return ""
    digest = hashlib.sha256()
    for token, index in sorted(vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index}\t{token}\n".encode())
    return digest.hexdigest()[:16]
