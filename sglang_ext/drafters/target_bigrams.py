"""The target's own bigrams: what it says after a single token, asked once and kept.

Source: N-Grammys (arXiv 2411.03786), the model-derived bigram. The target reads "\n" and a token,
for every token of the vocabulary, and the likeliest next tokens make a table. The line feed is
there because a model's first token draws most of the attention (StreamingLLM, arXiv 2309.17453):
without one before it a token predicts nothing. SSSD drafts from the table what it has never seen.

One file a model in ~/.cache/sglang-ext/bigrams, named after what it was asked of. A start asks for
some seconds, low token ids first (byte-pair merges come in the order of their frequency), and the
next start goes on. Delete the file to ask afresh.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datastores import Bigrams, DatastoreError
from sglang_ext.drafters.target_reader import TargetReader, model_identity, why_not
from sglang_ext.models.cached_tables import CachedTable
from sglang_ext.models.store import default_cache_dir

logger = logging.getLogger(__name__)

# Next tokens kept of each token: a fifth is never right often enough to be verified.
FOLLOWERS = 4
BEFORE = "\n"
# Tokens asked about in one pass: few at first, more while a pass takes a small part of the time.
_FIRST_AT_ONCE, _MOST_AT_ONCE = 8, 256
_PART = 0.05

# int64[n] tokens -> float32[n, vocabulary] logits of what follows each.
Ask = Callable[[Sequence[int]], torch.Tensor]
# What rank 0 says, on every rank.
Agree = Callable[[list[Any]], list[Any]]


def bigrams_of(worker: Any, seconds: float, agree: Agree) -> Bigrams | None:
    """The target's table, asked on for at most so many seconds; None where it cannot be asked.

    Call it before the first request, on all ranks at once: the pools are emptied behind it.

    Args:
        worker: SGLang's TpModelWorker, its attention backends made.
        agree: gives every rank rank 0's values, for clocks and files may differ.
    """
    runner, tokenizer = worker.model_runner, worker.tokenizer
    reason = why_not(runner, tokenizer)
    if reason:
        logger.info("sglang-ext bigrams: none, %s", reason)
        return None
    before = tokenizer.encode(BEFORE)
    identity = {**model_identity(runner), "before": before, "followers": FOLLOWERS}
    most_rows = min(_MOST_AT_ONCE, runner.req_to_token_pool.size)
    try:
        return asked_on(
            _Target(runner, before).logits_after,
            runner.model_config.vocab_size,
            identity,
            seconds,
            most_rows,
            agree,
        )
    except Exception:
        # Only the drafts are poorer for it.
        logger.warning("sglang-ext bigrams: the target could not be asked", exc_info=True)
        return None
    finally:
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()


def asked_on(
    ask: Ask,
    vocab_size: int,
    identity: Mapping[str, Any],
    seconds: float,
    most_rows: int,
    agree: Agree = lambda values: values,
) -> Bigrams:
    """The stored table, and what can be asked within so many seconds of what it lacks.

    Args:
        identity: what the table holds for.
        most_rows: tokens asked about at once, at most.
    """
    started = time.monotonic()
    folder = default_cache_dir() / "bigrams"
    kept = CachedTable(folder, identity, ".npz", "the target's bigrams are")
    known = kept.read(lambda path: _stored(path, vocab_size)) or _nothing(vocab_size)
    tokens, probs = agree(list(known))
    first = start = int((tokens[:, 0] >= 0).sum())
    rows, pass_s = min(_FIRST_AT_ONCE, most_rows), seconds
    while start < vocab_size:
        if pass_s < _PART * seconds:
            rows = min(2 * rows, most_rows)
        (rows,) = agree([rows if time.monotonic() - started < seconds else 0])
        if not rows:
            break
        asked = time.monotonic()
        end = min(start + rows, vocab_size)
        likely = torch.topk(torch.softmax(ask(range(start, end)).float(), dim=-1), FOLLOWERS)
        tokens[start:end] = likely.indices.cpu().numpy()
        probs[start:end] = likely.values.cpu().numpy()
        start, pass_s = end, time.monotonic() - asked
    if start > first:
        made_for = json.dumps(dict(identity))
        kept.keep(lambda file: np.savez(file, tokens=tokens, probs=probs, made_for=made_for))
    logger.info(
        "sglang-ext bigrams: of %d tokens of %d, %d of them asked in %.1f s (%s)",
        start,
        vocab_size,
        start - first,
        time.monotonic() - started,
        kept.path,
    )
    return Bigrams(tokens, probs)


class _Target:
    """Asked about tokens one by one.

    Args:
        before: tokens read before every other one; their K and V are shared where they can be.
    """

    def __init__(self, runner: Any, before: Sequence[int]) -> None:
        self._reader = TargetReader(runner)
        self._before = list(before)
        self._reader.share(self._before)

    def logits_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """float[n, vocabulary], of what follows each of these tokens."""
        return self._reader.read([[*self._before, token] for token in tokens])


def _stored(path: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The tables in a file; None where they are of another vocabulary."""
    with np.load(path) as stored:
        tokens, probs = stored["tokens"], stored["probs"]
    with suppress(DatastoreError):
        known = Bigrams(tokens, probs).known
        if tokens.shape == (vocab_size, FOLLOWERS) and (tokens[:known] >= 0).all():
            return tokens, probs
    return None


def _nothing(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables in which no token's followers are known."""
    shape = (vocab_size, FOLLOWERS)
    return np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
