"""JSON requests to another server, and what can be said of those that fail."""

import json
import ssl
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx

_CONNECT_S = 10.0
# A server that hangs must not hold captions up for ever; one without a GPU takes its time.
_ANSWER_S = 180.0


class RequestError(Exception):
    """A request that failed; the message is one line.

    Args:
        status: HTTP status; 0: there was no answer.
    """

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


def client(url: str, api_key: str, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client of the server at http://HOST:PORT.

    Args:
        headers: of all its requests, besides the key's.
    """
    key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
    return httpx.AsyncClient(
        base_url=url, headers={**key, **(headers or {})}, timeout=timeout, verify=_certificates()
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Those that are trusted; reading them takes long, and a server has many clients."""
    return httpx.create_ssl_context()


async def call(client: httpx.AsyncClient, method: str, path: str, **content: Any) -> dict[str, Any]:
    """The answer's JSON object.

    Args:
        content: httpx's: json, data, files.

    Raises:
        RequestError: no connection, no answer, or one that is no success.
    """
    try:
        response = await client.request(method, path, **content)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise RequestError(f"{client.base_url}: {reason}") from None
    try:
        body = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = None
    if not response.is_success:
        raise RequestError(_reason(response, body), response.status_code)
    if not isinstance(body, dict):
        raise RequestError(f"{client.base_url}{path} does not answer with JSON")
    return body


def _reason(response: httpx.Response, body: Any) -> str:
    try:
        message = str(body["error"]["message"])
    except (KeyError, TypeError):
        message = response.text[:200]
    return " ".join(f"HTTP {response.status_code}: {message}".split())
