"""WS /v1/realtime for a served Whisper, in place of SGLang's, which refuses it.

SGLang 0.5.23's session (entrypoints/openai/realtime/session.py) is for models that transcribe
chunk by chunk: it transcribes within its receive loop, and has neither server_vad nor prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, WebSocket
from starlette.routing import Match, WebSocketRoute

from datastores import DEFAULT_NAMESPACE
from sglang_ext.api.handshake import check_key, chosen, deny, header_namespace, offered
from sglang_ext.api.http import ApiError, tokenizer_manager
from sglang_ext.api.open_streams import Streams
from sglang_ext.api.realtime.realtime_session import RealtimeSession, SessionParts
from sglang_ext.api.realtime.realtime_settings import (
    LivePolicy,
    SessionSettings,
    SettingsParser,
    TurnDetection,
)
from sglang_ext.api.realtime.realtime_socket import POLICY, TRY_LATER, RealtimeSocket, turn_away
from sglang_ext.api.realtime.window_decoder import WindowDecoder
from sglang_ext.api.transcription.transcriptions import serves_whisper
from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from sglang_ext.drafters.rehearing import PARAMETER
from sglang_ext.options import Options
from sglang_ext.whisper.cross_attention import tells_frames
from speech.buffer import SpeechProbabilities
from speech.vad import default_detector

PATH = "/v1/realtime"
_PROTOCOL = "realtime"


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
    """Put the route before SGLang's own; other models keep that."""
    app.router.routes.insert(0, _WhisperSocketRoute(PATH, Realtime(_backend).socket))


class Realtime:
    """The endpoint.

    Args:
        backend: makes what sessions work with, at the first connection.
    """

    def __init__(self, backend: Callable[[], RealtimeBackend]):
        self._backend = cache(backend)
        self._streams = cache(self._new_streams)

    async def socket(self, socket: WebSocket) -> None:
        """One session."""
        backend = self._backend()
        try:
            check_key(socket, backend.api_key, protocols=True)
        except ApiError as error:
            return await deny(socket, error)
        await socket.accept(chosen(offered(socket), _PROTOCOL))
        try:
            namespace = header_namespace(socket, backend.options.namespace_header)
            parser = self._parser()
            parser.check_model(socket.query_params.get("model"), "model")
        except ApiError as error:
            return await turn_away(socket, error, POLICY)
        try:
            slot = self._streams().enter(namespace)
        except ApiError as error:
            return await turn_away(socket, _too_many(error), TRY_LATER)
        with slot:
            parts = SessionParts(
                parser,
                partial(_decoder, backend, namespace),
                backend.detector(),
                backend.held_s,
                backend.keep_alive_s,
                beta="realtime=v1" in socket.headers.get("openai-beta", ""),
            )
            limit = backend.options.websocket_message_kb << 10
            await RealtimeSocket(socket, partial(RealtimeSession, parts), limit).run()

    def _parser(self) -> SettingsParser:
        backend = self._backend()
        threshold = backend.options.vad_threshold
        default = SessionSettings(
            turn_detection=TurnDetection(threshold),
            policy=LivePolicy(
                backend.options.live_policy,
                backend.options.alignatt_frames,
                backend.options.realtime_step_seconds,
            ),
            least_probability=threshold,
        )
        engine = backend.engine
        return SettingsParser(engine.vocabulary, engine.model_names, default, backend.guided)

    def _new_streams(self) -> Streams:
        backend = self._backend()
        share = backend.options.namespace_share if backend.options.namespace_header else 1.0
        return Streams(backend.sessions, share)


def _decoder(
    backend: RealtimeBackend, namespace: str, settings: SessionSettings, before: str
) -> WindowDecoder:
    params = {} if namespace == DEFAULT_NAMESPACE else {"namespace": namespace}
    rehears = PARAMETER in backend.options.loaded_drafters()
    return WindowDecoder(backend.engine, settings, before, params, rehears)


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
