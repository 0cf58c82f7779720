"""The texts that a lens is fitted on: what was served, else what the package carries."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datastores import Datastore

# Questions of every kind, those with an even place: the others stay unseen, for benchmarks.
_CARRIED = Path(__file__).parents[1] / "sweep" / "data" / "spec_bench.jsonl.gz"
# Served tokens from which on they are enough by themselves.
ENOUGH = 16_384
# Longer texts are cut: what a token says hangs on the last few hundred before it.
LONGEST = 256
_SHORTEST = 8


def carried_texts(tokenizer: Any) -> list[list[int]]:
    """Token ids of every other question of Spec-Bench, in the model's chat template if it has one.

    The kinds of questions take turns.
    """
    by_kind: dict[str, list[str]] = {}
    with gzip.open(_CARRIED, "rt", encoding="utf-8") as lines:
        for place, line in enumerate(lines):
            if place % 2 == 0:
                row = json.loads(line)
                by_kind.setdefault(row["category"], []).append(row["turns"][0])
    most = max(map(len, by_kind.values()))
    order = [texts[i] for i in range(most) for texts in by_kind.values() if i < len(texts)]
    return [_encoded(tokenizer, text)[:LONGEST] for text in order]


def _encoded(tokenizer: Any, text: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(text))
    chat = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def served_texts(datastores: Sequence[Datastore], tokens: int = 4 * ENOUGH) -> list[list[int]]:
    """Token ids of what was served to nobody in particular and of corpora, the newest first.

    Of namespaces other than the default one nothing is read: they are other people's.

    Args:
        tokens: about how many at most.
    """
    texts: list[list[int]] = []
    left = tokens
    for datastore in datastores:
        for text in _documents(datastore):
            if left <= 0:
                return texts
            if len(text) >= _SHORTEST:
                texts.append(text)
                left -= len(text)
    return texts


def _documents(datastore: Datastore) -> Iterator[list[int]]:
    snapshot = datastore.snapshot()
    for segment in reversed(snapshot.segments):
        starts = segment.documents["start"]
        for at in range(len(starts) - 1, -1, -1):  # of which there may be millions
            start = int(starts[at])
            text = np.asarray(segment.tokens[start : start + LONGEST], np.int64)
            end = np.flatnonzero(text == snapshot.separator)
            yield text[: end[0] if len(end) else len(text)].tolist()


def frequent_tokens(texts: Iterable[Sequence[int]], most: int, vocab_size: int) -> torch.Tensor:
    """int64[n], ascending: the token ids that texts have most often, at most so many.

    Where the texts have fewer, the lowest ids follow: byte-pair merges come in the order of their
    frequency.
    """
    counts = np.zeros(vocab_size, np.float64)
    for text in texts:
        counts += np.bincount(np.asarray(text, np.int64), minlength=vocab_size)[:vocab_size]
    counts -= np.arange(vocab_size) / (vocab_size + 1.0)  # breaks ties, low ids first
    chosen = np.argsort(-counts, kind="stable")[: min(most, vocab_size)]
    return torch.from_numpy(np.sort(chosen))
