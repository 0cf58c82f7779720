"""SSSD: drafts retrieved from the prompt, the request's own output and a live datastore.

Source: SSSD (arXiv 2411.05894), Algorithms 1-3; the data structures are in `datastores`. A request
that brings a prediction (docs/prediction.md) is drafted from that first.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from datastores import (
    Bigrams,
    Continuations,
    Datastore,
    DatastoreError,
    InputTrie,
    RetrievalConfig,
    Snapshot,
    SupposedDrafts,
    extend_all,
    retrieve,
    warm_up,
)
from sglang_ext.drafters import Drafter, DrafterContext, DraftRequest
from sglang_ext.drafters.predicted_text import PredictedText, tokens_of
from sglang_ext.mirror.exit_view import ExitView
from sglang_ext.mirror.mirrored_retrieval import (
    NOTHING,
    Mirrored,
    MirroredRetrieval,
    Prepared,
    trees_of,
)
from sglang_ext.tree import TokenTree, merged

logger = logging.getLogger(__name__)

# The last prompt tokens go into the datastore with the output, so that its first tokens can be
# retrieved too.
PROMPT_TAIL = 16
# Trees that are remembered of steps whose early exit nobody told of.
_MOST_PROPOSED = 1024
# Retrieval is short against a pass: the later the exit, the more it foresees.
_EXIT_DEPTH = 0.94

# What a request may read: its namespace, and the corpora that it wants (None: all). None: nothing.
_Reads = tuple[str, tuple[str, ...] | None] | None


@dataclass
class _State:
    trie: InputTrie
    reads: _Reads
    predicted: PredictedText | None
    """None: the request brought no prediction."""


# A request, its state, and what was retrieved for it behind so many tokens of its output.
_Drafted = tuple[DraftRequest, _State, TokenTree, int]


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
        self._mirror: MirroredRetrieval | None = None
        if options.mirror_retrieval:
            self._mirror = MirroredRetrieval(self._suppose, options.mirror_outcomes)
        self._proposed: list[_Drafted] = []  # since the last early exit
        self._foreseen: Sequence[DraftRequest] = ()  # at the last one
        self._max_nodes = 0
        self._hits = self._misses = 0
        logger.info(
            "SSSD datastore: %d tokens%s%s, live ingest %s",
            self.datastore.num_tokens,
            f" from {options.datastore}" if options.datastore else "",
            "" if self.datastore.role == "alone" else f", as a fleet's {self.datastore.role}",
            "on" if self.ingests else "off",
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
            expected = tokens_of(request.params, self._vocab_size)
            predicted = PredictedText(expected) if expected else None
            request.state = _State(self._trie(request), _reads(request), predicted)

    def _trie(self, request: DraftRequest) -> InputTrie:
        """A request's prompt, indexed."""
        trie = InputTrie(self.config)
        trie.extend(np.asarray(request.prompt, dtype=np.int64))
        return trie

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
        if all(request.state.predicted is None for request in requests):
            trees = self._retrieve(requests, max_nodes)
            self._note_proposed(requests, trees, max_nodes)
            return trees
        trees = [self._predicted(request, max_nodes) for request in requests]
        rows = [i for i, r in enumerate(requests) if not self._agrees(r)]
        if rows:
            found = self._retrieve([requests[i] for i in rows], max_nodes)
            for i, tree in zip(rows, found, strict=True):
                trees[i] = merged([trees[i], tree], max_nodes) if len(trees[i]) else tree
            drafted = [requests[i] for i in rows], [trees[i] for i in rows]
            self._note_proposed(*drafted, max_nodes)
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
        if self._mirror is None:
            return self._retrieve_now(requests, max_nodes)
        prepared = self._prepared(requests)
        tries = [r.state.trie for r in requests]
        trees = prepared.trees(tries, [r.output for r in requests], self._snapshot)
        missing = [i for i, tree in enumerate(trees) if tree is None]
        self._hits += len(requests) - len(missing)
        self._misses += len(missing)
        if missing:
            made = self._retrieve_now([requests[i] for i in missing], max_nodes)
            for i, tree in zip(missing, made, strict=True):
                trees[i] = tree
        return trees  # type: ignore[return-value]  # none is missing now

    def _retrieve_now(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        tries = [request.state.trie for request in requests]
        _catch_up(requests, tries, [len(request.output) for request in requests])
        snapshots = self._snapshots([request.state.reads for request in requests])
        drafts = retrieve(tries, snapshots, max_nodes, self.config, bigrams=self._bigrams)
        return trees_of(drafts)

    def _note_proposed(
        self, requests: Sequence[DraftRequest], trees: Sequence[TokenTree], most: int
    ) -> None:
        if self._mirror is None:
            return
        self._max_nodes = most
        if len(self._proposed) > _MOST_PROPOSED:
            self._proposed.clear()
        self._proposed += [
            (r, r.state, tree, len(r.output)) for r, tree in zip(requests, trees, strict=True)
        ]

    def early_exit(self, requests: Sequence[DraftRequest], view: ExitView) -> None:
        """Begin to retrieve for the likely outcomes of a step that was drafted for."""
        if self._mirror is None:
            return
        # In a plain step without a look nothing was retrieved: there the next look does it. So it
        # is where a prediction holds.
        drafted = [
            (request, state, tree, length)
            for request, state, tree, length in self._proposed
            if length == len(request.output) and request.state is state
        ]
        self._proposed = []
        if drafted:
            self._foreseen = requests
            self._mirror.begin(view, partial(self._mirrored, view, drafted), self._max_nodes)

    def _mirrored(self, view: ExitView, drafted: Sequence[_Drafted]) -> Mapping[int, Mirrored]:
        """What is searched for requests, with what was drafted for them; in another thread.

        They may have gone on, or ended, since.
        """
        rows = {rid: row for row, rid in enumerate(view.rids)}
        drafted = [each for each in drafted if each[0].rid in rows]
        requests, states, _, lengths = zip(*drafted, strict=True)
        _catch_up(requests, [state.trie for state in states], lengths)
        snapshots = self._snapshots([state.reads for _, state, _, _ in drafted])
        return {
            rows[request.rid]: Mirrored(state.trie, length, state.reads, snapshot, tree)
            for (request, state, tree, length), snapshot in zip(drafted, snapshots, strict=True)
        }

    @property
    def uses_early_exit(self) -> bool:
        """Whether drafts are retrieved ahead."""
        return self._mirror is not None

    @property
    def exit_depth(self) -> float:
        """Late: what is left of a pass is enough."""
        return _EXIT_DEPTH

    @property
    def counters(self) -> Mapping[str, float]:
        """Drafts that were retrieved ahead when they were asked for, and those that were not."""
        if self._mirror is None:
            return {}
        return {
            "mirror_hits": self._hits,
            "mirror_misses": self._misses,
            "mirror_prepared": self._mirror.prepared,
        }

    def _snapshot(self, reads: _Reads) -> Snapshot | None:
        return None if reads is None else self.datastore.snapshot(*reads)

    def _snapshots(self, reads: Sequence[_Reads]) -> list[Snapshot | None]:
        """What may be read now."""
        snapshots = {each: self._snapshot(each) for each in set(reads)}
        return [snapshots[each] for each in reads]

    def _prepared(self, requests: Sequence[DraftRequest]) -> Prepared:
        """What was retrieved ahead; the requests may be extended then."""
        assert self._mirror is not None
        try:
            return self._mirror.take()
        except TimeoutError as error:
            logger.error("%s: from now on drafts are retrieved when they are needed", error)
            # Its thread may still read what these requests have seen.
            for request in [*requests, *self._foreseen]:
                if request.state is not None:
                    request.state.trie = self._trie(request)
            return NOTHING

    def _suppose(
        self,
        tries: Sequence[InputTrie],
        snapshots: Sequence[Snapshot | None],
        continuations: Continuations,
        max_nodes: int,
    ) -> SupposedDrafts:
        return SupposedDrafts(
            tries, snapshots, continuations, max_nodes, self.config, self._bigrams
        )

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Let the finished output join its namespace, under the name it can be deleted by."""
        request.state = None
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


def _catch_up(
    requests: Sequence[DraftRequest], tries: Sequence[InputTrie], lengths: Sequence[int]
) -> None:
    """Index the first tokens of the outputs, so many of each, as far as they are not.

    Here and not in `observe`: several plain steps at once.
    """
    new = [
        request.output[len(trie) - len(request.prompt) : length]
        for request, trie, length in zip(requests, tries, lengths, strict=True)
    ]
    extend_all(tries, new)


def _reads(request: DraftRequest) -> _Reads:
    options = request.options
    return (options.namespace, options.corpora) if options.datastore else None


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
    if "://" in options.datastore:
        raise DatastoreError(
            "--datastore is an address, which `sglang-ext serve` alone fetches: start the server "
            "with that, or bring it to a folder with `sglang-ext datastore pull`"
        )
    if options.datastore:
        given["fold_tokens"] = options.datastore_fold_tokens
        given["shared"] = options.datastore_shared
        return Datastore.open(options.datastore, **given)
    return Datastore(**given)
