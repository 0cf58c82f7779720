"""WS /v1/realtime for a served Whisper, in place of SGLang's, which refuses it, and what SGLang
lacks: WS /v1/realtime/translations, and WS /v1/realtime/views for those who only watch.

SGLang 0.5.23's session (entrypoints/openai/realtime/session.py) is for models that transcribe
chunk by chunk: it transcribes within its receive loop, and has neither server_vad nor prompts.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, WebSocket
from starlette.routing import Match, WebSocketRoute

from datastores import DEFAULT_NAMESPACE
from sglang_ext.api.calls import client
from sglang_ext.api.handshake import check_key, chosen, deny, header_namespace, offered
from sglang_ext.api.http import ApiError, tokenizer_manager
from sglang_ext.api.open_streams import Streams
from sglang_ext.api.realtime.realtime_events import Event
from sglang_ext.api.realtime.realtime_session import RealtimeSession, SessionParts
from sglang_ext.api.realtime.realtime_settings import (
    LivePolicy,
    SessionSettings,
    SettingsParser,
    TurnDetection,
)
from sglang_ext.api.realtime.realtime_socket import (
    POLICY,
    TRY_LATER,
    RealtimeSocket,
    SocketSession,
    turn_away,
)
from sglang_ext.api.realtime.settings_fields import ALIGNATT, LOCAL_AGREEMENT, VIEW_NAME
from sglang_ext.api.realtime.translation_session import TranslationSession
from sglang_ext.api.realtime.translation_settings import TranslationParser
from sglang_ext.api.realtime.views import Publisher, Views, watch
from sglang_ext.api.realtime.window_decoder import WindowDecoder
from sglang_ext.api.transcription.transcriptions import serves_whisper
from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from sglang_ext.drafters.rehearing import PARAMETER
from sglang_ext.options import Options
from sglang_ext.whisper.cross_attention import tells_frames
from speech.buffer import SpeechProbabilities
from speech.vad import default_detector

PATH = "/v1/realtime"
TRANSLATIONS = "/v1/realtime/translations"
VIEWS = "/v1/realtime/views"
_PROTOCOL = "realtime"

Session = Callable[[Callable[[Event], None], Callable[[], None]], SocketSession]
"""Makes a session of what sends its events and what tells that it is broken."""


@dataclass(frozen=True)
class RealtimeBackend:
    """What sessions work with.

    Attributes:
        detector: makes what tells speech from silence, for one session.
        api_key: SGLang's --api-key; None: all may connect.
        sessions: open at once, SGLang's --asr-max-concurrent-sessions.
        held_s: seconds of audio that may wait, SGLang's --asr-max-buffer-seconds.
        guided: whether answers tell what their tokens attend to (step/attended_frames.py).
    """

    engine: WhisperEngine
    options: Options
    detector: Callable[[], SpeechProbabilities]
    api_key: str | None = None
    sessions: int = 32
    held_s: float = 60.0
    keep_alive_s: float = 15.0
    guided: bool = False


class _WhisperSocketRoute(WebSocketRoute):
    """A route that is there only while the served model is a Whisper."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        return super().matches(scope) if serves_whisper() else (Match.NONE, {})


def register(app: FastAPI) -> None:
    """Put the routes before SGLang's own; other models keep that."""
    realtime = Realtime(_backend)
    app.router.routes[:0] = [
        _WhisperSocketRoute(PATH, realtime.socket),
        _WhisperSocketRoute(TRANSLATIONS, realtime.translations),
        _WhisperSocketRoute(VIEWS, realtime.viewer),
    ]


class Realtime:
    """The endpoints; their sessions count as one kind.

    Args:
        backend: makes what sessions work with, at the first connection.
    """

    def __init__(self, backend: Callable[[], RealtimeBackend]):
        self._backend = cache(backend)
        self._streams = cache(self._new_streams)
        self._viewers = cache(lambda: self._new_streams(self._backend().options.max_streams))
        self._views = Views()

    async def socket(self, socket: WebSocket) -> None:
        """One transcription session."""
        await self._serve(socket, SettingsParser, lambda parts, _: partial(RealtimeSession, parts))

    async def translations(self, socket: WebSocket) -> None:
        """One translation session."""
        backend = self._backend()
        options, url = backend.options, backend.options.translate_with

        def session(parts: SessionParts, namespace: str) -> Session:
            if not url and not backend.engine.vocabulary.multilingual:
                raise ApiError(
                    "this server translates no live speech: start it with --translate-with URL, "
                    "the address of a text server (--drafters ssbd)",
                    501,
                    code="not_supported",
                )
            header, default = options.namespace_header, namespace == DEFAULT_NAMESPACE
            headers = {} if default else {header: namespace}
            address = url.rstrip("/").removesuffix("/v1")
            text_server = client(address, options.translate_key, headers)
            return partial(TranslationSession, parts, text_server)

        parser = partial(TranslationParser, text_server=bool(url))
        await self._serve(socket, parser, session)

    async def viewer(self, socket: WebSocket) -> None:
        """One viewer of a session."""
        if (namespace := await self._entered(socket)) is None:
            return
        name = socket.query_params.get("view", "")
        if not re.fullmatch(VIEW_NAME, name):
            expected = "view must name what a session has in session.sglang_ext.view"
            return await turn_away(socket, ApiError(expected, param="view"), POLICY)
        try:
            slot = self._viewers().enter(namespace)
        except ApiError as error:
            return await turn_away(socket, error, TRY_LATER)
        with slot:
            try:
                await watch(socket, self._views.at(namespace, name))
            finally:
                self._views.tidy(namespace, name)

    async def _entered(self, socket: WebSocket) -> str | None:
        """Accept a client that has the key; its namespace, None: it was refused."""
        backend = self._backend()
        try:
            check_key(socket, backend.api_key, protocols=True)
        except ApiError as error:
            await deny(socket, error)
            return None
        await socket.accept(chosen(offered(socket), _PROTOCOL))
        try:
            return header_namespace(socket, backend.options.namespace_header)
        except ApiError as error:
            await turn_away(socket, error, POLICY)
            return None

    async def _serve(
        self,
        socket: WebSocket,
        parser_type: Callable[..., SettingsParser],
        session: Callable[[SessionParts, str], Session],
    ) -> None:
        """One session.

        Args:
            session: of its parts and its namespace.
        """
        backend = self._backend()
        if (namespace := await self._entered(socket)) is None:
            return
        try:
            parser = self._parser(parser_type)
            parser.check_model(socket.query_params.get("model"), "model")
            parts = SessionParts(
                parser,
                partial(_decoder, backend, namespace),
                backend.detector(),
                backend.held_s,
                backend.keep_alive_s,
                beta="realtime=v1" in socket.headers.get("openai-beta", ""),
            )
            made = session(parts, namespace)
        except ApiError as error:
            return await turn_away(socket, error, POLICY)
        try:
            slot = self._streams().enter(namespace)
        except ApiError as error:
            return await turn_away(socket, _too_many(error), TRY_LATER)
        with slot:
            await self._run(socket, namespace, made)

    async def _run(self, socket: WebSocket, namespace: str, made: Session) -> None:
        """A session, and what it shows to others."""
        publishers: list[Publisher] = []

        def published(send: Callable[[Event], None], broken: Callable[[], None]) -> SocketSession:
            publishers.append(Publisher(self._views, namespace, send))
            return made(publishers[-1].send, broken)

        limit = self._backend().options.websocket_message_kb << 10
        try:
            await RealtimeSocket(socket, published, limit).run()
        finally:
            for publisher in publishers:
                publisher.close()

    def _parser(self, parser_type: Callable[..., SettingsParser]) -> SettingsParser:
        backend = self._backend()
        threshold = backend.options.vad_threshold
        policy = backend.options.live_policy
        if policy == "auto":
            policy = ALIGNATT if backend.guided else LOCAL_AGREEMENT
        default = SessionSettings(
            turn_detection=TurnDetection(threshold),
            policy=LivePolicy(
                policy,
                backend.options.alignatt_frames,
                backend.options.realtime_step_seconds,
                backend.options.live_padding_seconds,
            ),
            least_probability=threshold,
        )
        engine = backend.engine
        return parser_type(engine.vocabulary, engine.model_names, default, backend.guided)

    def _new_streams(self, most: int | None = None) -> Streams:
        backend = self._backend()
        share = backend.options.namespace_share if backend.options.namespace_header else 1.0
        return Streams(most or backend.sessions, share)


def _decoder(
    backend: RealtimeBackend, namespace: str, settings: SessionSettings, before: str
) -> WindowDecoder:
    params = {} if namespace == DEFAULT_NAMESPACE else {"namespace": namespace}
    rehears = PARAMETER in backend.options.loaded_drafters()
    return WindowDecoder(backend.engine, settings, before, params, rehears, backend.guided)


def _too_many(error: ApiError) -> ApiError:
    message = "as many realtime sessions are open as may be (--asr-max-concurrent-sessions, "
    return ApiError(message + "--namespace-share); try again later", error.status, None, error.code)


def _backend() -> RealtimeBackend:
    """What sessions work with, of the server that this process is."""
    from sglang.srt.runtime_context import get_serving

    serving, manager = get_serving(), tokenizer_manager()
    return RealtimeBackend(
        WhisperEngine(manager),
        Options.from_env(),
        lambda: default_detector().stream(),
        serving.api_key,
        serving.asr_max_concurrent_sessions,
        serving.asr_max_buffer_seconds,
        guided=tells_frames(manager.server_args),
    )
