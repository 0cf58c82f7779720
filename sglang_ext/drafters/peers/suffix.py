"""Suffix decoding, a peer of SSSD's, through Snowflake's own arctic-inference.

Source: Oliaro et al., SuffixDecoding (arXiv 2411.04975); the package's SuffixDecodingCache, used
as vLLM uses it (v1/spec_decode/suffix_decoding.py), with vLLM's defaults: trees 24 tokens deep,
at most as many tokens as were matched, each of an estimated chance of at least 0.1.

A peer to measure against, not to serve tenants with: a namespace has a cache of its own, made
from the corpora when it is first used, and the least recently used ones are forgotten.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_ext.drafters import Drafter, DrafterContext, DrafterError, DraftRequest
from sglang_ext.tree import TokenTree

TREE_DEPTH = 24
MOST_REQUESTS = 10_000
FACTOR = 1.0
LEAST_PROB = 0.1
_NAMESPACES = 8


class SuffixDrafter(Drafter):
    """Drafts from the prompt, the outputs of running and finished requests, and named corpora."""

    def __init__(self, context: DrafterContext) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise DrafterError(
                "the drafter 'suffix' needs arctic-inference: docs/peers.md tells how to install it"
            ) from error
        self._new_cache = SuffixDecodingCache
        self._corpora: dict[str, list[Sequence[int]]] = {}
        self._caches: OrderedDict[str, Any] = OrderedDict()

    def start(self, request: DraftRequest) -> None:
        """Index the prompt and the output so far."""
        request.state = cache = self._cache(request.options.namespace)
        cache.start_request(request.rid, _ids(request.prompt))
        cache.add_active_response(request.rid, _ids(request.output))

    def observe(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        """Index what was written."""
        request.state.add_active_response(request.rid, _ids(tokens))

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Drop the prompt; the output stays in the cache, unless it is not to be ingested."""
        cache, request.state = request.state, None
        if cache is None:
            return
        cache.stop_request(request.rid)
        kept = completed and request.options.ingest
        if not kept and request.rid in cache.cached_requests:
            cache.evict_cached_response(request.rid)

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The cache's own draft for each request."""
        return [self._tree(request, max_nodes) for request in requests]

    def add_corpus(self, name: str, documents: Sequence[Sequence[int]]) -> int:
        """Let a named corpus be cached outputs; returns its number of tokens.

        What the caches have learned before is forgotten.
        """
        if name in self._corpora:
            raise ValueError(f"corpus {name!r} is there already; remove it first")
        # Anew and not in place: corpora come in another thread than the scheduler's.
        self._corpora = self._corpora | {name: list(documents)}
        self._caches = OrderedDict()
        return self.list_corpora()[name]

    def remove_corpus(self, name: str) -> None:
        """Make the caches anew without it, when they are next used."""
        if name in self._corpora:
            self._corpora = {n: d for n, d in self._corpora.items() if n != name}
            self._caches = OrderedDict()

    def list_corpora(self) -> dict[str, int]:
        """Tokens by named corpus."""
        return {name: sum(map(len, documents)) for name, documents in self._corpora.items()}

    def forget(self, namespace: str | None, name: str | None = None) -> None:
        """Forget a namespace's cache (None: all), for one request of it too: names are not kept.

        Requests that run keep theirs until they end.
        """
        # Anew and not in place, as above.
        self._caches = OrderedDict(
            (n, c) for n, c in self._caches.items() if namespace not in (None, n)
        )

    def _cache(self, namespace: str) -> Any:
        caches = self._caches
        if namespace not in caches:
            caches[namespace] = self._filled_cache()
            if len(caches) > _NAMESPACES:
                caches.popitem(last=False)
        caches.move_to_end(namespace)
        return caches[namespace]

    def _filled_cache(self) -> Any:
        cache = self._new_cache(max_tree_depth=TREE_DEPTH, max_cached_requests=MOST_REQUESTS)
        for name, documents in self._corpora.items():
            for number, document in enumerate(documents):
                key = f"corpus {name} {number}"
                cache.start_request(key, _ids(()))
                cache.add_active_response(key, _ids(document))
                cache.stop_request(key)
        return cache

    @staticmethod
    def _tree(request: DraftRequest, max_nodes: int) -> TokenTree:
        missing = TREE_DEPTH - len(request.output)
        prompt = request.prompt[-missing:] if missing > 0 else ()
        draft = request.state.speculate(
            request.rid,
            _ids([*prompt, *request.output[-TREE_DEPTH:]]),
            max_spec_tokens=min(max_nodes, TREE_DEPTH),
            max_spec_factor=FACTOR,
            min_token_prob=LEAST_PROB,
        )
        return TokenTree(
            np.asarray(draft.token_ids, dtype=np.int64),
            np.asarray(draft.parents, dtype=np.int32),
            np.asarray(draft.probs, dtype=np.float32),
        )


def _ids(tokens: Sequence[int]) -> Any:
    """int32[n], as the package takes them."""
    return np.ascontiguousarray(tokens, dtype=np.int32)
