"""Offline replay: how many tokens a step would commit, and how honest the probabilities are.

A held-back document is the answer that the target is going to give: each step drafts from what
precedes, commits the draft's longest path that agrees plus the next token, and goes on. No model
is needed; a target that decodes greedily and gives these very answers accepts just these tokens.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from datastores.config import DatastoreError, RetrievalConfig
from datastores.input_trie import InputTrie
from datastores.retrieval import Draft, retrieve
from datastores.segment import Snapshot

_BINS = 10


@dataclass
class ReplayResult:
    """Sums over all steps of a replay."""

    s_q: int
    """Nodes per draft, the root included."""
    steps: int = 0
    tokens: int = 0
    """Tokens committed, each step's bonus token included."""
    proposed: int = 0
    log_loss: float = 0.0
    """Sum over the nodes of -log of the probability given to what happened, in nats."""
    seconds: np.ndarray = field(default_factory=lambda: np.empty(0))
    """float64[steps]: time of each retrieval."""
    bin_nodes: np.ndarray = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    bin_predicted: np.ndarray = field(default_factory=lambda: np.zeros(_BINS))
    bin_observed: np.ndarray = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    """Per tenth of probability: nodes, their probabilities' sum, how many were right."""

    @property
    def accept_length(self) -> float:
        """Tokens per step, the bonus token included: 1.0 is plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def loss_per_step(self) -> float:
        """Log loss of all nodes per step, in nats: compares options at the same s_q."""
        return self.log_loss / self.steps if self.steps else 0.0

    @property
    def calibration(self) -> list[tuple[int, float, float]]:
        """(nodes, mean predicted, observed share) for each tenth of probability that occurs."""
        return [
            (int(n), float(predicted / n), float(observed / n))
            for n, predicted, observed in zip(
                self.bin_nodes, self.bin_predicted, self.bin_observed, strict=True
            )
            if n
        ]

    @property
    def calibration_error(self) -> float:
        """Mean absolute gap between predicted and observed, over tenths, weighted by nodes."""
        gaps = np.abs(self.bin_predicted - self.bin_observed).sum()
        return float(gaps / max(1, self.bin_nodes.sum()))

    def table(self) -> str:
        """The calibration as lines of text."""
        lines = ["   nodes  predicted  observed"]
        lines += [f"{n:8d}  {p:9.3f}  {o:8.3f}" for n, p, o in self.calibration]
        return "\n".join(lines)


def replay(
    documents: Iterable[Sequence[int] | np.ndarray],
    snapshot: Snapshot | None,
    config: RetrievalConfig | None = None,
    s_q: int = 8,
    *,
    prompt_tokens: int | Sequence[int] = 100,
    max_new_tokens: int = 200,
) -> ReplayResult:
    """Replays documents that the datastore (a snapshot of it; None: input only) must not hold.

    documents: token ids, prompt and answer. prompt_tokens: how many of them are the prompt, one
    number or one per document; documents without an answer are skipped. max_new_tokens: tokens
    replayed per document. For one source alone set max_samples (datastore) or max_input_samples
    (input) to 0 in the config.
    """
    if s_q < 1:
        raise DatastoreError(f"s_q counts the root and must be at least 1, got {s_q}")
    config = config or RetrievalConfig()
    result = ReplayResult(s_q)
    seconds: list[float] = []
    for index, document in enumerate(documents):
        tokens = np.asarray(document, np.int32)
        split = prompt_tokens if isinstance(prompt_tokens, int) else prompt_tokens[index]
        end = min(tokens.size, split + max_new_tokens)
        trie = InputTrie(config)
        trie.extend(tokens[:split])
        while split < end:
            began = time.perf_counter()
            (draft,) = retrieve([trie], snapshot, s_q - 1, config)
            seconds.append(time.perf_counter() - began)
            right = _agreeing(draft, tokens[split:end])
            committed = min(int(right.sum()) + 1, end - split)
            _record(result, draft, right)
            result.steps += 1
            result.tokens += committed
            trie.extend(tokens[split : split + committed])
            split += committed
    result.seconds = np.array(seconds)
    return result


def _agreeing(draft: Draft, truth: np.ndarray) -> np.ndarray:
    """bool[n]: the nodes that lie on the path of the true continuation."""
    right = np.zeros(len(draft), np.bool_)
    depth = np.zeros(len(draft), np.int64)
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        depth[node] = 0 if parent < 0 else depth[parent] + 1
        if (parent < 0 or right[parent]) and depth[node] < truth.size:
            right[node] = token == truth[depth[node]]
    return right


def _record(result: ReplayResult, draft: Draft, right: np.ndarray) -> None:
    probs = draft.probs.astype(np.float64)
    result.proposed += probs.size
    clipped = np.clip(probs, 1e-9, 1 - 1e-9)
    result.log_loss -= float(np.log(np.where(right, clipped, 1 - clipped)).sum())
    bins = np.minimum((probs * _BINS).astype(np.int64), _BINS - 1)
    result.bin_nodes += np.bincount(bins, minlength=_BINS)
    result.bin_predicted += np.bincount(bins, probs, minlength=_BINS)
    result.bin_observed += np.bincount(bins, right, minlength=_BINS).astype(np.int64)
