"""OpenAI's audio API for a served Whisper, in place of SGLang's:

POST /v1/audio/transcriptions   in the language that is spoken
POST /v1/audio/translations     into English
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.routing import Match

from sglang_ext.api.transcription.transcriber import Delta, Limits, Progress, Transcription
from sglang_ext.api.transcription.transcription_request import TranscriptionRequest, parse
from sglang_ext.api.transcription.uploads import ApiError, read_form
from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from sglang_ext.options import Options
from sglang_ext.whisper.audio_processor import ARCHITECTURE
from speech import formats
from speech.alignment import Aligner
from speech.audio_errors import AudioError, AudioTooLong, DecodersBusy
from speech.segments import Transcript

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PATHS = {"transcribe": "/v1/audio/transcriptions", "translate": "/v1/audio/translations"}
_DISCONNECT_POLL_S = 1.0
_CLIENT_CLOSED_REQUEST = 499


class _WhisperRoute(APIRoute):
    """A route that is there only while the served model is a Whisper."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        return super().matches(scope) if _serves_whisper() else (Match.NONE, {})


def register(app: FastAPI) -> None:
    """Put the routes before SGLang's own; other models keep those."""
    for position, (path, endpoint) in enumerate(
        ((_PATHS["transcribe"], transcriptions), (_PATHS["translate"], translations))
    ):
        route = _WhisperRoute(path, endpoint, methods=["POST"], response_model=None)
        app.router.routes.insert(position, route)


async def transcriptions(request: Request) -> Response:
    """OpenAI's createTranscription."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    """OpenAI's createTranslation."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    options, engine = _options(), _engine()
    async with contextlib.AsyncExitStack() as cleanup:
        try:
            form = await read_form(request, options.transcription_max_upload_mb << 20)
            cleanup.push_async_callback(form.close)
            wanted = parse(form, task, engine.vocabulary, engine.model_names)
            limits = Limits(
                options.transcription_max_seconds,
                options.transcription_parallel,
                options.vad_threshold,
            )
            aligner = _aligner_for(wanted) if wanted.words else None
            work = Transcription(engine, wanted, limits, aligner)
            if wanted.stream:
                events = _events(work, wanted, engine)
                # The first event tells whether the audio can be read, while a status can.
                first = await _while_connected(request, _first(events))
                kept = cleanup.pop_all()
                return StreamingResponse(_then(first, events, kept), media_type="text/event-stream")
            return await _while_connected(request, _whole(work, wanted, engine))
        except Exception as error:
            return _refusal(error).response()
    raise AssertionError("not reached")


async def _whole(
    work: Transcription, wanted: TranscriptionRequest, engine: WhisperEngine
) -> Response:
    async with contextlib.aclosing(work.run()) as events:
        async for event in events:
            if isinstance(event, Transcript):
                body = _body(event, wanted, engine)
                if isinstance(body, str):
                    return Response(body, media_type=formats.MEDIA_TYPES[wanted.response_format])
                return JSONResponse(body)
    raise AssertionError("a transcription ends with a transcript")


def _body(
    transcript: Transcript, wanted: TranscriptionRequest, engine: WhisperEngine
) -> dict[str, Any] | str:
    """The transcript in the format that was asked for."""
    match wanted.response_format:
        case "text":
            return formats.to_text(transcript)
        case "srt":
            return formats.to_srt(transcript.segments)
        case "vtt":
            return formats.to_vtt(transcript.segments)
        case "verbose_json":
            body = formats.to_verbose_json(transcript, wanted.granularities)
        case _:
            body = formats.to_json(transcript, engine.vocabulary if wanted.logprobs else None)
    if wanted.return_token_ids:
        body["token_ids"] = [list(ids) for ids in transcript.token_ids]
    return body


async def _events(
    work: Transcription, wanted: TranscriptionRequest, engine: WhisperEngine
) -> AsyncGenerator[str]:
    """OpenAI's event stream; errors after the first event come as an event too."""
    started = False
    try:
        async with contextlib.aclosing(work.run()) as events:
            async for event in events:
                if (line := _event(event, wanted, engine)) is not None:
                    started = True
                    yield line
    except Exception as error:
        if not started:
            raise
        yield _line(_refusal(error).body())


def _event(
    event: Delta | Progress | Transcript, wanted: TranscriptionRequest, engine: WhisperEngine
) -> str | None:
    if isinstance(event, Delta):
        return _line({"type": "transcript.text.delta", "delta": event.text})
    if isinstance(event, Progress):
        if not wanted.progress:
            return None
        return _line({"type": "transcript.progress", "seconds": round(event.seconds, 2)})
    done: dict[str, Any] = {
        "type": "transcript.text.done",
        "text": event.text,
        "usage": formats.token_usage(event),
    }
    if wanted.logprobs:
        done["logprobs"] = formats.logprobs(event.logprobs, engine.vocabulary)
    if wanted.progress:
        done["result"] = _body(event, wanted, engine)
    return _line(done)


def _line(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def _then(
    first: str, events: AsyncGenerator[str], cleanup: contextlib.AsyncExitStack
) -> AsyncGenerator[str]:
    async with cleanup, contextlib.aclosing(events):
        yield first
        async for event in events:
            yield event


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The work's result; if the client goes, the work is given up.

    Raises:
        ApiError: the client has gone; nobody will see it.
    """
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=_DISCONNECT_POLL_S)
            if done:
                return task.result()
            if await request.is_disconnected():
                raise ApiError("the client has gone", _CLIENT_CLOSED_REQUEST)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _first(events: AsyncGenerator[str]) -> str:
    return await anext(events)


def _refusal(error: Exception) -> ApiError:
    """The error as OpenAI's API would give it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, AudioTooLong):
        return ApiError(str(error), 400, "file", "audio_too_long")
    if isinstance(error, AudioError):
        return ApiError(str(error), 400, "file", "invalid_value")
    if isinstance(error, DecodersBusy):
        return ApiError(str(error), 503, "file", "server_busy")
    if isinstance(error, ValueError):  # SGLang's, and those of custom_params
        return ApiError(str(error), 400)
    logger.error("a transcription failed", exc_info=error)
    return ApiError(f"{type(error).__name__}: {error}", 500)


def _aligner_for(wanted: TranscriptionRequest) -> Aligner:
    """The aligner; the draft model is the cheaper one, where it speaks the language.

    Raises:
        ApiError: the server has none.
    """
    options = _options()
    if options.word_aligner == "none":
        raise ApiError(
            "this server makes no word timestamps (--word-aligner none)",
            param="timestamp_granularities",
        )
    if options.word_aligner:
        return _aligner(options.word_aligner)
    if options.draft_model and wanted.task == "transcribe" and wanted.language:
        drafter = _aligner(options.draft_model)
        if drafter.speaks(wanted.language):
            return drafter
    return _aligner(_engine().model_path)


@cache
def _aligner(model: str) -> Aligner:
    from sglang_ext import models

    folder = Path(models.resolve(model))
    if not folder.is_dir():  # a hub id; SGLang has downloaded it
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True))
    return Aligner(folder)


@cache
def _options() -> Options:
    return Options.from_env()


@cache
def _engine() -> WhisperEngine:
    return WhisperEngine(_manager())


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


@cache
def _serves_whisper() -> bool:
    config = getattr(_manager(), "model_config", None)
    return ARCHITECTURE in (getattr(config and config.hf_config, "architectures", None) or ())
