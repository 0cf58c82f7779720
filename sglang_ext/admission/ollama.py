"""Errors of SGLang's Ollama routes, which let them end the connection or in a 500.

SGLang 0.5.23's entrypoints/ollama/serving.py has no handler for the ValueErrors by which its
tokenizer manager refuses requests, and streams before it has asked.
"""

import os
from typing import Any

import orjson

_PATHS = frozenset(
    {
        os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat"),
        os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate"),
    }
)


class OllamaErrors:
    """ASGI middleware: what is refused is a 400 with Ollama's error, or a stream's last line.

    Args:
        app: the next ASGI application.
    """

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            return await self._app(scope, receive, send)
        start: Any = None
        started = False

        async def held(message: Any) -> None:
            """The status waits for the first line, which may turn out to be an error."""
            nonlocal start, started
            if message["type"] == "http.response.start":
                start = message
                return
            if not started:
                started = True
                await send(start)
            await send(message)

        try:
            await self._app(scope, receive, held)
        except ValueError as error:
            line = orjson.dumps({"error": str(error).encode(errors="replace").decode()}) + b"\n"
            if not started:
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 400, "headers": headers})
            await send({"type": "http.response.body", "body": line})
