"""What comes before a WebSocket is accepted: its key, its namespace, and refusals."""

import hmac
from collections.abc import Sequence

from fastapi import WebSocket
from starlette.requests import HTTPConnection

from datastores import DEFAULT_NAMESPACE
from sglang_ext.api.http import ApiError
from sglang_ext.request_options import RequestOptionError, check_namespace

KEY_PROTOCOL = "openai-insecure-api-key."
"""Browsers can set no header of a WebSocket: there the key follows this in a subprotocol."""


def check_key(connection: HTTPConnection, api_key: str | None, protocols: bool = False) -> None:
    """As SGLang does for HTTP (utils/auth.py), which sees no WebSockets.

    Args:
        api_key: SGLang's --api-key; None: all may connect.
        protocols: the key may come as a subprotocol too.

    Raises:
        ApiError: there is a key, and the client does not have it (401).
    """
    if not api_key:
        return
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    keys = [given] if scheme.lower() == "bearer" else []
    if protocols:
        keys += [p.removeprefix(KEY_PROTOCOL) for p in offered(connection) if _is_key(p)]
    expected = api_key.encode()
    if not any(hmac.compare_digest(key.encode("latin-1"), expected) for key in keys):
        raise ApiError("the header Authorization must be: Bearer, and the server's API key", 401)


def offered(connection: HTTPConnection) -> list[str]:
    """The subprotocols that a client offers."""
    values = connection.headers.getlist("sec-websocket-protocol")
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def chosen(names: Sequence[str], wanted: str) -> str | None:
    """The subprotocol to answer with: `wanted`, else the first that is no key."""
    if wanted in names:
        return wanted
    return next((name for name in names if not _is_key(name)), None)


def header_namespace(connection: HTTPConnection, header: str) -> str:
    """The namespace that a header names (namespaces.NamespaceHeader sees no WebSockets).

    Args:
        header: its name; "": none does.

    Raises:
        ApiError: it comes with several values, or names none.
    """
    values = set(connection.headers.getlist(header)) if header else set()
    if not values:
        return DEFAULT_NAMESPACE
    if len(values) > 1:
        raise ApiError(f"the header {header} comes with several values")
    try:
        return check_namespace(values.pop(), f"the header {header}")
    except RequestOptionError as error:
        raise ApiError(str(error)) from None


async def deny(socket: WebSocket, error: ApiError) -> None:
    """Refuse the handshake, with the error where the server can send one."""
    if "websocket.http.response" in (socket.scope.get("extensions") or {}):
        await socket.send_denial_response(error.response())
    else:
        await socket.close()


def _is_key(name: str) -> bool:
    return name.startswith(KEY_PROTOCOL)
