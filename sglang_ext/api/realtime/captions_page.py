"""GET /captions: a page that captions a microphone, a tab or a file over /v1/realtime.

One file, without a build step; the browser contacts no other host, which a policy holds.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Match, Route

from sglang_ext.api.openapi import TAG, Schema, change_schema, describe
from sglang_ext.api.transcription.transcriptions import serves_whisper
from sglang_ext.options import Options

PATH = "/captions"
OVERLAY = "/captions/overlay"
_NO_TRANSLATIONS = 'data-translates=""'
_FOLDER = Path(__file__).parent


class _WhisperPage(Route):
    """A route that is there only while the served model is a Whisper."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        return super().matches(scope) if serves_whisper() else (Match.NONE, {})


def register(app: FastAPI) -> None:
    """Add the page, which is no secret: it asks for the key itself."""
    app.router.routes[:0] = [
        _WhisperPage(path, endpoint, methods=["GET"])
        for path, endpoint in ((PATH, page), (OVERLAY, overlay))
    ]
    change_schema(app, _describe)


def _describe(schema: Schema) -> None:
    """Put the pages into /openapi.json where they are."""
    if serves_whisper():
        routes = [
            APIRoute(path, endpoint, methods=["GET"], tags=[TAG], response_class=HTMLResponse)
            for path, endpoint in ((PATH, page), (OVERLAY, overlay))
        ]
        describe(schema, routes)


async def page(request: Request) -> HTMLResponse:
    """The page; where there is a text server, it offers translations."""
    text, policy = _page("captions.html")
    if Options.from_env().translate_with:
        text = text.replace(_NO_TRANSLATIONS, 'data-translates="yes"')
    return _answer(text, policy)


async def overlay(request: Request) -> HTMLResponse:
    """What a session shows, to be laid over a video: the last two lines, on nothing."""
    return _answer(*_page("overlay.html"))


def _answer(text: str, policy: str) -> HTMLResponse:
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


@cache
def _page(name: str) -> tuple[str, str]:
    """A page, and what it may do: run its own script, and speak with its own server."""
    text = (_FOLDER / name).read_text(encoding="utf-8")
    script, style = (_hash(text, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script} blob:; style-src {style}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


def _hash(text: str, tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def let_in(original: Callable[..., Any], **request: Any) -> Any:
    """SGLang's decision about keys (utils/auth.py); the pages alone need none.

    Args:
        original: decides.
        request: what it takes, `method` and `path` among it.
    """
    from sglang.srt.utils.auth import AuthDecision

    asks = request["method"] in ("GET", "HEAD") and request["path"] in (PATH, OVERLAY)
    if asks and serves_whisper():
        return AuthDecision(allowed=True)
    return original(**request)
