"""The datastore over HTTP. Errors have OpenAI's shape; SGLang's admin key guards every route:

GET    /datastore                          size, state, problems
POST   /datastore/flush                    wait until all that was served is searchable
GET    /datastore/namespaces               tokens by namespace
POST   /datastore/namespaces/name          the name of the namespace of a cache_salt, an extra_key
DELETE /datastore/namespaces/{namespace}   forget a tenant
DELETE /datastore/requests/{rid}           forget one request's output, or a translation session
GET    /datastore/corpora                  named corpora, and whose they are
POST   /datastore/corpora                  add one, for all or for one namespace
DELETE /datastore/corpora/{corpus}         remove one
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_ext.admission.cache_salts import salt_namespace
from sglang_ext.api.datastore import answers, corpora
from sglang_ext.api.datastore.control import ControlError
from sglang_ext.api.datastore.control_client import call_all
from sglang_ext.api.http import ApiError, tokenizer_manager
from sglang_ext.api.openapi import REFUSALS, TAG
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptionError, check_namespace


class Salts(BaseModel):
    """SGLang's fields of a request that divide its prefix cache."""

    cache_salt: str | None = None
    extra_key: str | None = None


class NewCorpus(BaseModel):
    """A corpus to add: SGLang's fields of /add_external_corpus, and whose it is."""

    corpus_id: str | None = None
    namespace: str | None = None
    documents: list[str] | None = None
    file_path: str | None = None


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def info() -> JSONResponse:
    """The datastore's size and state; with data parallelism a list of them."""
    return await _answer("info", lambda infos: infos[0] if len(infos) == 1 else {"ranks": infos})


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def flush(timeout: float = Query(30.0, gt=0, le=300)) -> JSONResponse:
    """Wait until all that was served before is searchable."""
    return await _answer("flush", _largest, timeout_s=timeout + 5, timeout=timeout)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def namespaces() -> JSONResponse:
    """Served tokens by namespace."""
    return await _answer("namespaces", lambda found: {"namespaces": _largest(found)})


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def namespace_name(salts: Salts) -> JSONResponse:
    """The name under which the namespace of salts is listed, and can be deleted."""
    key = Options.from_env().namespace_key
    name = salt_namespace(salts.extra_key, salts.cache_salt, key)
    if name is None:
        return ApiError("the body must have cache_salt, extra_key or both", code=400).response()
    return JSONResponse({"namespace": name})


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def delete_namespace(request: Request, namespace: str) -> JSONResponse:
    """Remove a namespace from memory and disk, and its sessions; answers when it is gone."""
    _forget_sessions(request, namespace, None)
    return await _answer("delete_namespace", _deleted, namespace=namespace)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def delete_request(request: Request, rid: str, namespace: str | None = None) -> JSONResponse:
    """Remove what one request, or a translation session, contributed from memory and disk.

    Answers when it is gone.
    """
    _forget_sessions(request, namespace, rid)
    return await _answer("delete_request", _deleted, rid=rid, namespace=namespace)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def list_corpora() -> JSONResponse:
    """Each corpus: its namespace (null: everybody's) and name."""
    return await _answer("corpora", lambda ranks: {"corpora": ranks[0]})


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def add_corpus(corpus: NewCorpus) -> JSONResponse:
    """Add a corpus, for all namespaces or for one; answers when it can be drafted from."""
    from sglang.srt.runtime_context import get_spec

    limit = get_spec().speculative_ngram_external_corpus_max_tokens
    try:
        if corpus.namespace is not None:
            check_namespace(corpus.namespace, "namespace")
        tokenizer = tokenizer_manager().tokenizer
        name, tokens, note = await asyncio.to_thread(
            corpora.load, tokenizer, corpus, limit, corpus.namespace
        )
    except (corpora.CorpusError, RequestOptionError) as error:
        return ApiError(str(error), code=400).response()
    except ControlError as error:
        return ApiError(str(error), error.status, code=error.status).response()
    added = {"namespace": corpus.namespace, "name": name, "tokens": tokens}
    return JSONResponse(added | ({"note": note.strip()} if note else {}))


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def remove_corpus(corpus: str) -> JSONResponse:
    """Remove a corpus: by its name, one of a namespace by NAMESPACE/NAME."""
    return await _answer("remove_corpus", _deleted, corpus=corpus)


def add_routes(app: FastAPI) -> None:
    """Add the routes to SGLang's application.

    One by one: SGLang looks an endpoint's auth level up among the application's own routes and
    does not find it in a router that was included.
    """
    for method, path, endpoint, answer in (
        ("GET", "/datastore", info, answers.Info),
        ("POST", "/datastore/flush", flush, answers.Flushed),
        ("GET", "/datastore/namespaces", namespaces, answers.Namespaces),
        ("POST", "/datastore/namespaces/name", namespace_name, answers.NamespaceName),
        ("DELETE", "/datastore/namespaces/{namespace}", delete_namespace, answers.Deleted),
        ("DELETE", "/datastore/requests/{rid:path}", delete_request, answers.Deleted),
        ("GET", "/datastore/corpora", list_corpora, answers.Corpora),
        ("POST", "/datastore/corpora", add_corpus, answers.AddedCorpus),
        ("DELETE", "/datastore/corpora/{corpus:path}", remove_corpus, answers.Deleted),
    ):
        # The endpoints give whole responses, so the model of the answer is a description alone.
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=answer,
            responses=REFUSALS,
            tags=[TAG],
        )
    app.add_exception_handler(json.JSONDecodeError, _not_json)


async def _not_json(request: Request, error: Exception) -> JSONResponse:
    """SGLang's corpus endpoints let a body that is no JSON end in a 500."""
    if not request.url.path.endswith(("_external_corpus", "_external_corpora")):
        raise error
    return ApiError(f"the body is not JSON: {error}", code=400).response()


async def _answer(op: str, merge: Any, **arguments: Any) -> JSONResponse:
    try:
        # In a thread: the event loop serves requests meanwhile.
        return JSONResponse(merge(await asyncio.to_thread(call_all, op, **arguments)))
    except ControlError as error:
        return ApiError(str(error), error.status, code=error.status).response()


def _forget_sessions(request: Request, namespace: str | None, session_id: str | None) -> None:
    """Close translation sessions, where this server has any; what they run is aborted."""
    forget = getattr(request.app.state, "forget_sessions", None)
    if forget is not None:
        forget(namespace, session_id)


def _summed(results: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for result in results:
        for name, tokens in result.items():
            total[name] = total.get(name, 0) + tokens
    return total


def _largest(results: Sequence[dict[str, int]]) -> dict[str, int]:
    """What ranks tell of the datastore that they share; one may lag behind."""
    names = dict.fromkeys(name for result in results for name in result)
    return {name: max(result.get(name, 0) for result in results) for name in names}


def _deleted(results: Sequence[dict[str, int]]) -> dict[str, int]:
    return {"deleted_tokens": _summed(results)["tokens"]}
