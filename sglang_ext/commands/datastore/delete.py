"""`sglang-ext datastore delete`: in a folder that no server uses, or through the server."""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from datastores import Datastore, DatastoreError
from datastores.corpus_names import shown_name
from datastores.folder import Folder
from sglang_ext.commands.datastore.build_progress import Waiting

_TIMEOUT_S = 300.0


def run(args: argparse.Namespace) -> int:
    """Deletes what args name; returns the exit code."""
    if (args.folder is None) == (args.url is None):
        raise DatastoreError("name either the FOLDER, or the server that uses it with --url")
    if args.drafters and args.namespace is None:
        raise DatastoreError("--drafters go with --namespace: drafters know no requests or corpora")
    try:
        print(_ask_server(args) if args.url else _delete(args))
    except DatastoreError as error:
        if "in use by process" in str(error):
            raise DatastoreError(
                f"{error} (--url http://HOST:PORT, without {args.folder})"
            ) from None
        raise
    if args.drafters:
        _name_drafters(args.drafters, args.namespace)
    return 0


def _name_drafters(folders: Sequence[str], namespace: str) -> None:
    """Print which drafters were trained on what is gone."""
    from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
    from sglang_ext.commands.drafter.show_drafter import list_drafters

    print("drafters keep what they have learned; of those to be trained anew:")
    try:
        list_drafters([Path(folder) for folder in folders], namespace)
    except BlockDrafterError as error:
        raise DatastoreError(str(error)) from None


def _delete(args: argparse.Namespace) -> str:
    folder = args.folder
    if args.all_unfinished or args.corpus is not None:
        return _delete_corpora(folder, args.corpus)
    with Waiting("deleting"), Datastore.open(folder, create=False) as store:
        if args.namespace is not None:
            return _removed(store.delete_namespace(args.namespace), f"namespace {args.namespace!r}")
        return _removed(store.delete_document(args.request), f"request {args.request!r}")


def _removed(tokens: int, what: str) -> str:
    return (
        f"{what}: {tokens:,} tokens deleted" if tokens else f"{what}: there was nothing to delete"
    )


def _delete_corpora(folder: str, name: str | None) -> str:
    """Deletes one corpus, finished or not; None: all that are unfinished."""
    opened = Folder(
        folder, vocab_size=None, tokenizer_fingerprint=None, create=False, read_only=False
    )
    try:
        building = opened.manifest.building
        tokens = {corpus: 0 for corpus in building}
        for file in opened.files:
            if file.entry.corpus is not None:
                corpus = shown_name(file.entry.corpus)
                tokens[corpus] = tokens.get(corpus, 0) + file.entry.tokens
        if name is not None and name not in tokens:
            known = ", ".join(map(repr, tokens)) or "none"
            raise DatastoreError(f"there is no corpus {name!r} in {folder}; there are: {known}")
        gone = list(building) if name is None else [name]
        opened.publish(
            remove=[file for file in opened.files if shown_name(file.entry.corpus or "") in gone],
            building={k: v for k, v in building.items() if k not in gone},
        )
    finally:
        opened.close()
    return "\n".join(_removed(tokens[n], f"corpus {n!r}") for n in gone) or "none is unfinished"


# -- through the server --------------------------------------------------------------------


def _ask_server(args: argparse.Namespace) -> str:
    if args.all_unfinished:
        raise DatastoreError("--all-unfinished needs the FOLDER, and no server may be using it")
    if args.namespace is not None:
        path = f"/datastore/namespaces/{quote(args.namespace, safe='')}"
        return _removed(_deleted(args, path), f"namespace {args.namespace!r}")
    if args.request is not None:
        path = f"/datastore/requests/{quote(args.request, safe='')}"
        return _removed(_deleted(args, path), f"request {args.request!r}")
    call_server(args, "POST", "/remove_external_corpus", {"corpus_id": args.corpus})
    return f"corpus {args.corpus!r}: deleted"


def _deleted(args: argparse.Namespace, path: str) -> int:
    return int(call_server(args, "DELETE", path).get("deleted_tokens", 0))


def call_server(
    args: argparse.Namespace, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a route of the server at args.url answers. DatastoreError: it refuses, or is away."""
    url = args.url.rstrip("/") + path
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise DatastoreError(
            f"the server at {args.url} refused ({error.code}): {_reason(error.read())}"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DatastoreError(
            f"cannot ask the server at {args.url}: {reason}; expected --url http://HOST:PORT"
        ) from None


def _reason(body: bytes) -> str:
    """The message of an error reply, ours (OpenAI's shape) or SGLang's."""
    try:
        content = json.loads(body)
        error = content.get("error", content)
        message = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = None
    text = message if isinstance(message, str) else body.decode(errors="replace")
    return " ".join(text.split())[:300]
