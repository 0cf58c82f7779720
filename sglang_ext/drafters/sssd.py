"""SSSD: drafts retrieved from the prompt, the request's own output and a live datastore.

Source: SSSD (arXiv 2411.05894), Algorithms 1-3; the data structures are in `datastores`. A request
that brings a prediction (docs/prediction.md) is drafted from that first.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from datastores import (
    Bigrams,
    Datastore,
    InputTrie,
    RetrievalConfig,
    retrieve,
    warm_up,
)
from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest
from sglang_ext.drafters.predicted_text import PredictedText, tokens_of
from sglang_ext.tree import TokenTree, merged

logger = logging.getLogger(__name__)

# The last prompt tokens go into the datastore with the output, so that its first tokens can be
# retrieved too.
PROMPT_TAIL = 16


@dataclass
class _State:
    trie: InputTrie
    predicted: PredictedText | None
    """None: the request brought no prediction."""


class RetrievalDrafter(Drafter):
    """Drafts what followed the last P tokens, here and in what was served before."""

    def __init__(self, context: DrafterContext):
        options = context.options
        self.config = RetrievalConfig(
            prefix_length=options.prefix_length,
            branch_length=options.branch_length,
            max_samples=options.max_samples,
        )
        self.ingests = options.live_ingest
        self._vocab_size = context.vocab_size
        self._datastore = open_datastore(context)
        self._bigrams: Bigrams | None = None
        warm_up(context.vocab_size)
        logger.info(
            "SSSD datastore: %d tokens%s%s, live ingest %s",
            self.datastore.num_tokens,
            f" from {options.datastore}" if options.datastore else "",
            ", followed" if self.datastore.follows else "",
            "on" if self.ingests and not self.datastore.follows else "off",
        )

    @property
    def datastore(self) -> Datastore:
        """What was served before, and named corpora."""
        return self._datastore

    def take_bigrams(self, bigrams: Bigrams) -> None:
        """Draft what was never seen from what the target says after single tokens."""
        self._bigrams = bigrams

    def prepare(self, requests: Sequence[DraftRequest]) -> None:
        """Index the prompts, which another server is still reading."""
        for request in requests:
            trie = InputTrie(self.config)
            trie.extend(np.asarray(request.prompt, dtype=np.int64))
            expected = tokens_of(request.params, self._vocab_size)
            request.state = _State(trie, PredictedText(expected) if expected else None)

    def start(self, request: DraftRequest) -> None:
        """Index the prompt; the output is indexed when it is searched."""
        if request.state is None:
            self.prepare([request])

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The likeliest continuations of each request, best first.

        A request's drafts come from what it predicts; where it has none, or the two have parted,
        from its own tokens and, unless it asks for these alone, from corpora (those that it
        chooses, else all that its namespace may read) and what its namespace was served before.
        """
        trees = [self._predicted(request, max_nodes) for request in requests]
        rows = [i for i, r in enumerate(requests) if not self._agrees(r)]
        if rows:
            found = self._retrieve([requests[i] for i in rows], max_nodes)
            for i, tree in zip(rows, found, strict=True):
                trees[i] = merged([trees[i], tree], max_nodes) if len(trees[i]) else tree
        return trees

    @staticmethod
    def _predicted(request: DraftRequest, max_nodes: int) -> TokenTree:
        predicted = request.state.predicted
        if predicted is None:
            return TokenTree.empty()
        predicted.follow(request.output)
        return predicted.drafts(max_nodes)

    @staticmethod
    def _agrees(request: DraftRequest) -> bool:
        predicted = request.state.predicted
        return predicted is not None and predicted.agrees

    def _retrieve(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        for request in requests:
            # Here and not in `observe`: one call for the tokens of several plain steps.
            trie = request.state.trie
            trie.extend(request.output[len(trie) - len(request.prompt) :])
        read = {_reads(r) for r in requests if r.options.datastore}
        snapshots = {what: self.datastore.snapshot(*what) for what in read}
        drafts = retrieve(
            [r.state.trie for r in requests],
            [snapshots[_reads(r)] if r.options.datastore else None for r in requests],
            max_nodes,
            self.config,
            bigrams=self._bigrams,
        )
        return [TokenTree(d.tokens.astype(np.int64), d.parents, d.probs, d.sources) for d in drafts]

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Let the finished output join its namespace, under the name it can be deleted by."""
        request.state = None
        if self.datastore.follows:
            return  # the server that writes to it takes in what it has served itself
        if self.ingests and completed and request.options.ingest:
            self.datastore.add(
                [*request.prompt[-PROMPT_TAIL:], *request.output],
                namespace=request.options.namespace,
                name=request.deletion_name,
            )

    def add_corpus(self, name: str, documents: Sequence[Sequence[int]]) -> int:
        """Serve a named corpus beside the live outputs; returns its number of tokens."""
        return self.datastore.add_corpus(name, documents)

    def add_bound_corpus(
        self, namespace: str, name: str, documents: Sequence[Sequence[int]]
    ) -> int:
        """Serve a corpus to one namespace; returns its number of tokens."""
        return self.datastore.add_corpus(name, documents, namespace)

    def remove_corpus(self, name: str) -> None:
        """Stop serving a named corpus."""
        self.datastore.remove_corpus(name)

    def list_corpora(self) -> dict[str, int]:
        """Tokens by named corpus."""
        return self.datastore.list_corpora()


def _reads(request: DraftRequest) -> tuple[str, tuple[str, ...] | None]:
    """A request's namespace, and the corpora that it wants (None: all)."""
    return request.options.namespace, request.options.corpora


def open_datastore(context: DrafterContext) -> Datastore:
    """The datastore in the folder that the options name, or an empty one in memory.

    Raises:
        DatastoreError: the folder cannot be used, or was built for another tokenizer.
    """
    options = context.options
    given: dict[str, Any] = {
        "vocab_size": context.vocab_size,
        "tokenizer_fingerprint": context.tokenizer_fingerprint,
        "live_share": options.namespace_share,
    }
    if options.datastore_max_tokens:
        given["max_tokens"] = options.datastore_max_tokens
    if options.datastore:
        given["fold_tokens"] = options.datastore_fold_tokens
        given["shared"] = options.datastore_shared
        return Datastore.open(options.datastore, **given)
    return Datastore(**given)
