"""check_operators: drafts of tenants that salts name, corpora bound to them, and contradictions.

Every tenant's outputs and its bound corpus begin like all others' and go on with tokens that no
other text has, so a draft with another's text shows it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from scripts.lib.http_client import HTTP
from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.server import Server
from sglang_ext.admission.cache_salts import salt_namespace
from sglang_ext.drafters import DrafterContext, DraftRequest, load
from sglang_ext.drafters.named_corpora import Corpora
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions

SALTS = (*(f"tenant-{i}" for i in range(7)), None)
SHARED = None
_QUICK_DRAFTS = 1600
_CONTEXTS, _CONTEXT, _MARKERS, _COMMON = 50, 10, 8, 1000
_BATCH, _NODES = 16, 40
_FLUSH_S = 60.0
_CORPUS = "own"
_NAMESPACE = "acme"
_HEADER = "x-sglang-ext-namespace"


def check(options: argparse.Namespace) -> dict[str, float]:
    """leaks, own_text_drafts, drafts_checked and contradictions_accepted."""
    drafts = _QUICK_DRAFTS if options.quick else options.drafts
    flags = ["--speculative-algorithm", "SSSD", "--drafters", "ssbd"]
    found = Tenants().check(drafts)
    with Server(options.model, flags, name="salts") as server:
        return found | contradictions(server.base_url, options.model)


class Tenants:
    """SSSD with the outputs and the corpora of several tenants."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._contexts = self._rng.integers(0, _COMMON, (_CONTEXTS, _CONTEXT)).tolist()
        texts = 2 * _CONTEXTS * (len(SALTS) + 1)
        self._owner: dict[int, str] = {}
        self._next = _COMMON
        vocab_size = _COMMON + texts * _MARKERS
        self._drafter = load("sssd", DrafterContext(vocab_size, Options()))
        self._namespaces = [_name(salt) for salt in SALTS]
        for namespace in self._namespaces:
            self._serve(namespace)
        corpora = Corpora([self._drafter])
        for namespace in self._namespaces:
            corpora.add(_CORPUS, self._texts(namespace), namespace)
        corpora.add("shared", self._texts("shared"))
        assert self._drafter.datastore is not None
        self._drafter.datastore.flush(_FLUSH_S)

    def check(self, drafts: int) -> dict[str, float]:
        """Look at so many trees, of all tenants and of requests that choose corpora.

        Raises:
            NothingShown: hardly a tree has its tenant's own text.
        """
        leaks = own = 0
        requests = self._requests()
        for _ in tqdm(range(0, drafts, _BATCH), desc="drafts", disable=None, leave=False):
            batch = [next(requests) for _ in range(_BATCH)]
            for request in batch:
                self._drafter.start(request)
            for request, tree in zip(batch, self._drafter.propose(batch, _NODES), strict=True):
                owners = {self._owner[t] for t in tree.tokens.tolist() if t in self._owner}
                readable = {request.options.namespace, "shared"}
                if request.options.corpora == ():
                    readable.discard("shared")
                own += request.options.namespace in owners
                if owners - readable:
                    leaks += 1
                    print(f"{request.options} was drafted {owners - readable}", file=sys.stderr)
        if own < drafts // 4:
            raise NothingShown(f"only {own} of {drafts} drafts have their tenant's own text")
        return {"drafts_checked": drafts, "leaks": leaks, "own_text_drafts": own}

    def _serve(self, namespace: str) -> None:
        options = RequestOptions(namespace=namespace)
        for i, text in enumerate(self._texts(namespace)):
            request = DraftRequest(f"{namespace}-{i}", text[:-1], text[-1:], options=options)
            self._drafter.start(request)
            self._drafter.finish(request, True)

    def _texts(self, owner: str) -> list[list[int]]:
        texts = []
        for context in self._contexts:
            markers = list(range(self._next, self._next + _MARKERS))
            self._next += _MARKERS
            self._owner.update(dict.fromkeys(markers, owner))
            texts.append([*context, *markers])
        return texts

    def _requests(self) -> Iterator[DraftRequest]:
        """Contexts as any tenant would write them, by turns, with corpora of all kinds chosen."""
        chosen: tuple[tuple[str, ...] | None, ...] = (None, (_CORPUS,), (), ("shared", _CORPUS))
        while True:
            context = self._contexts[int(self._rng.integers(_CONTEXTS))]
            for namespace in (*self._namespaces, "stranger"):
                corpora = chosen[int(self._rng.integers(len(chosen)))]
                options = RequestOptions(namespace=namespace, corpora=corpora)
                yield DraftRequest("r", context[:-1], context[-1:], options=options)


def _name(salt: str | None) -> str:
    return salt_namespace(None, salt, "key") or "default"


def contradictions(url: str, model: str) -> dict[str, float]:
    """Requests whose salt and namespace contradict each other, or that name no corpus, not refused.

    Raises:
        NothingShown: requests without a contradiction are refused as well.
    """
    named = {"custom_params": {"namespace": _NAMESPACE}}
    chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    text = {"model": model, "prompt": "a", "max_tokens": 2}
    session = {"source_language": "en", "target_language": "fr"}
    routes: Sequence[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("/generate", {"text": "a"}, {"sampling_params": {"max_new_tokens": 2, **named}}),
        ("/generate", {"text": ["a", "b"]}, {"sampling_params": {"max_new_tokens": 2, **named}}),
        ("/generate", {"text": "a"}, {"sampling_params": {"n": 2, "max_new_tokens": 2, **named}}),
        ("/v1/completions", text, named),
        ("/v1/completions", {**text, "n": 2, "stream": True}, named),
        ("/v1/chat/completions", chat, named),
        ("/v1/chat/completions", {**chat, "n": 2}, named),
        ("/v1/translation/sessions", session, {}),
    ]
    accepted = refused_rightly = 0
    for path, body, params in routes:
        for salt in ("cache_salt", "extra_key"):
            salted = {**body, salt: "pepper"}
            accepted += _is_taken(url + path, {**salted, **params}, {_HEADER: _NAMESPACE})
            accepted += bool(params) and _is_taken(url + path, {**salted, **params}, {})
            refused_rightly += not _is_taken(url + path, salted, {})
    corpora = {"sampling_params": {"custom_params": {"corpora": ["no such"]}}}
    accepted += _is_taken(f"{url}/generate", {"text": "a", **corpora}, {})
    if refused_rightly:
        raise NothingShown(f"{refused_rightly} requests with a salt alone are refused too")
    return {"contradictions_accepted": accepted}


def _is_taken(url: str, body: dict[str, Any], headers: dict[str, str]) -> bool:
    answer = HTTP.post(url, json=body, headers=headers, timeout=120)
    if answer.status_code not in (200, 201, 400):
        print(f"{url} {body}: {answer.status_code} {answer.text[:200]}", file=sys.stderr)
        return True
    return answer.status_code != 400
