"""How a fuzzer's requests are sent, and what an answer must be."""

import json
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from scripts.lib.fuzz_grammar import FuzzRequest
from scripts.lib.http_client import HTTP

TIMEOUT_S = 120.0
# The server has no such feature, or no room: it says so, and nothing is broken.
_HONEST = frozenset({501, 503})
_SESSIONS = "/v1/translation/sessions"
_SESSION = {"source_language": "en", "target_language": "fr", "max_tokens": 4}
_KNOWN = {
    "input_ids": [504, 3575, 282, 4649, 314],
    "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
}


class Outcome(str):
    """ "answered", or what was wrong: "unanswered ..." or "5xx ..."."""

    @property
    def is_good(self) -> bool:
        """Whether the request was answered, and not by an error of the server."""
        return self.startswith("answered")


class FuzzClient:
    """Sends requests to one server; may be used by several threads.

    Args:
        url: of the server.
    """

    def __init__(self, url: str):
        self._url = url

    def known(self) -> list[int]:
        """The greedy output of a valid request."""
        answer = HTTP.post(self._url + "/generate", json=_KNOWN, timeout=TIMEOUT_S)
        answer.raise_for_status()
        return list(answer.json()["output_ids"])

    def load_corpus(self) -> None:
        """Add a corpus, and remove it: the server copies its tokenizer for the first one."""
        corpus = {"corpus_id": "warm-up"}
        for path, body in (
            ("/add_external_corpus", corpus | {"documents": ["warm-up"]}),
            ("/remove_external_corpus", corpus),
        ):
            answer = HTTP.post(self._url + path, json=body, timeout=TIMEOUT_S)
            if not (answer.is_success and answer.json()["success"]):
                raise ValueError(f"{path}: {answer.text[:300]}")

    def alive(self) -> bool:
        """Whether the server answers."""
        try:
            return HTTP.get(self._url + "/health", timeout=30).is_success
        except httpx.HTTPError:
            return False

    def send(self, request: FuzzRequest) -> Outcome:
        """Send a request and read all of its answer."""
        try:
            if request.method == "WS":
                return self._socket(request)
            if "{session}" in request.path:
                request = replace(request, path=request.path.format(session=self._session()))
            return self._send(request)
        except (httpx.HTTPError, OSError, ValueError) as error:
            return Outcome(f"unanswered {type(error).__name__}: {str(error)[:200]}")

    def _send(self, request: FuzzRequest) -> Outcome:
        data = None if request.body is None else encoded(request)
        headers = {"content-type": request.content_type} if request.content_type else {}
        url = self._url + quote(request.path, safe="/?=&%.")
        answer = HTTP.request(request.method, url, content=data, headers=headers, timeout=TIMEOUT_S)
        if answer.status_code >= 500 and answer.status_code not in _HONEST:
            return Outcome(f"5xx {answer.status_code}: {answer.text[:300]}")
        if "event-stream" in answer.headers.get("content-type", ""):
            return _of_events(answer.text)
        return Outcome(f"answered {answer.status_code}")

    def _session(self) -> str:
        made = HTTP.post(self._url + _SESSIONS, json=_SESSION, timeout=TIMEOUT_S)
        return str(made.json().get("id", "none")) if made.is_success else "none"

    def _socket(self, request: FuzzRequest) -> Outcome:
        session = self._session()
        url = f"{self._url.replace('http', 'ws', 1)}{_SESSIONS}/{session}/ws"
        try:
            with connect(url, open_timeout=TIMEOUT_S, max_size=None, proxy=None) as socket:
                for message in request.messages:
                    text = message if isinstance(message, str) else dumped(message)
                    socket.send(text.encode(errors="replace").decode())
                answers = 0
                while answers < len(request.messages):
                    answer = json.loads(socket.recv(timeout=TIMEOUT_S))
                    error = answer.get("error")
                    if error and error.get("type") == "server_error":
                        return Outcome(f"5xx {error}")
                    answers += bool(error) or answer.get("object") == "translation.update"
        except (ConnectionClosed, InvalidStatus) as error:
            return Outcome(f"answered {type(error).__name__}")
        finally:
            HTTP.delete(f"{self._url}{_SESSIONS}/{session}", timeout=TIMEOUT_S)
        return Outcome("answered")


def encoded(request: FuzzRequest) -> bytes:
    """A body's bytes."""
    if request.kind == "raw":
        return str(request.body).encode("utf-8", "replace")
    return dumped(request.body).encode()


def dumped(value: Any) -> str:
    """JSON as Python writes it: NaN, infinities and lone surrogates included."""
    return json.dumps(value)


def _of_events(text: str) -> Outcome:
    """Errors of a server within a stream of events."""
    for line in text.splitlines():
        if not line.startswith("data:") or "error" not in line:
            continue
        try:
            error = json.loads(line[5:]).get("error")
        except (ValueError, AttributeError):
            continue
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and code >= 500 and code not in _HONEST:
            return Outcome(f"5xx in a stream: {line[:300]}")
    return Outcome("answered 200")
