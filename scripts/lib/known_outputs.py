"""Outputs that are known from their numbers, for checks that kill processes: what a datastore was
given, and what it has."""

import numpy as np

from datastores import Datastore
from datastores.segment import document_digest
from sglang_ext.drafters import DrafterContext, DraftRequest
from sglang_ext.drafters.sssd import PROMPT_TAIL, RetrievalDrafter
from sglang_ext.options import Options

VOCAB = 49152
DOCUMENT_TOKENS = 120
PROMPT_TOKENS = 20
# Small, so that folds and merges run all the time.
FOLD_TOKENS = 1 << 13


def document(k: int) -> np.ndarray:
    """int64[DOCUMENT_TOKENS], the k-th output: different for every k, and known from k."""
    steps = np.arange(DOCUMENT_TOKENS, dtype=np.int64)
    return ((k + 1) * 2654435761 + steps * (2 * k + 7919)) % (VOCAB - 1)


def drafter_on(folder: str, shared: bool = False) -> RetrievalDrafter:
    """The drafter of a server, without SGLang, on a durable datastore that folds all the time."""
    options = Options(datastore=folder, datastore_fold_tokens=FOLD_TOKENS, datastore_shared=shared)
    context = DrafterContext(
        vocab_size=VOCAB, options=options, tokenizer_fingerprint="known-outputs"
    )
    return RetrievalDrafter(context)


def serve(drafter: RetrievalDrafter, k: int) -> None:
    """The k-th output is served; on return a server would answer."""
    text = document(k).tolist()
    request = DraftRequest(rid=name_of(k), prompt=text[:PROMPT_TOKENS], output=text[PROMPT_TOKENS:])
    drafter.start(request)
    drafter.propose([request], 15)
    drafter.finish(request, completed=True)


def drafts_from(drafter: RetrievalDrafter, k: int) -> bool:
    """Whether the k-th output is a draft."""
    text = document(k).tolist()
    # All but the last prompt tokens of an output are not kept.
    request = DraftRequest(rid="check", prompt=text[20:40], output=text[40:60])
    drafter.start(request)
    (tree,) = drafter.propose([request], 8)
    return len(tree) > 0 and int(tree.tokens[0]) == text[60]


def name_of(k: int) -> str:
    """The request's id of the k-th output."""
    return f"r{k}"


def is_stored(found: dict[bytes, np.ndarray], k: int) -> bool:
    """Whether stored_documents() has the k-th output whole."""
    kept = DOCUMENT_TOKENS - PROMPT_TOKENS + PROMPT_TAIL  # with the last prompt tokens
    return np.array_equal(found.get(document_digest(name_of(k)), ()), document(k)[-kept:])


def stored_documents(folder: str) -> dict[bytes, np.ndarray]:
    """Every served output of a folder by the digest of its name, read as a restart reads it."""
    found: dict[bytes, np.ndarray] = {}
    with Datastore.open(folder, read_only=True) as store:
        for namespace in store.namespaces():
            for segment in store.snapshot(namespace).live:
                starts = segment.documents["start"].astype(np.int64)
                ends = np.append(starts[1:], segment.tokens.size) - 1
                for row, start, end in zip(segment.documents, starts, ends, strict=True):
                    found[bytes(row["digest"])] = segment.tokens[start:end]
    return found
