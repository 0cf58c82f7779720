"""OpenAI's audio API for a served Whisper, in place of SGLang's:

POST /v1/audio/transcriptions   in the language that is spoken
POST /v1/audio/translations     into English
"""

import contextlib
from collections.abc import AsyncGenerator
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.routing import Match

from sglang_ext.api.http import (
    ApiError,
    answering,
    event,
    event_stream,
    refusal,
    tokenizer_manager,
    while_connected,
)
from sglang_ext.api.openapi import Schema, change_schema, describe
from sglang_ext.api.transcription.transcriber import Delta, Limits, Progress, Transcription
from sglang_ext.api.transcription.transcription_answers import DESCRIPTION
from sglang_ext.api.transcription.transcription_request import TranscriptionRequest, parse
from sglang_ext.api.transcription.uploads import read_form
from sglang_ext.api.transcription.whisper_engine import WhisperEngine
from sglang_ext.options import Options
from sglang_ext.whisper.audio_processor import ARCHITECTURE
from speech import formats
from speech.alignment import Aligner
from speech.audio_errors import AudioError, AudioTooLong, DecodersBusy
from speech.segments import Transcript

_PATHS = {"transcribe": "/v1/audio/transcriptions", "translate": "/v1/audio/translations"}


class _WhisperRoute(APIRoute):
    """A route that is there only while the served model is a Whisper."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        return super().matches(scope) if serves_whisper() else (Match.NONE, {})


def register(app: FastAPI) -> None:
    """Put the routes before SGLang's own; other models keep those."""
    app.router.routes[:0] = _made(_WhisperRoute, in_schema=False)
    change_schema(app, _describe)


def _made(kind: type[APIRoute], *, in_schema: bool) -> list[APIRoute]:
    endpoints = {"transcribe": transcriptions, "translate": translations}
    return [
        kind(
            _PATHS[task],
            answering(endpoint, _refusal),
            methods=["POST"],
            include_in_schema=in_schema,
            **DESCRIPTION,
        )
        for task, endpoint in endpoints.items()
    ]


def _describe(schema: Schema) -> None:
    """Put the routes into /openapi.json where they are; SGLang's own stand there otherwise."""
    if serves_whisper():
        describe(schema, _made(APIRoute, in_schema=True))


async def transcriptions(request: Request) -> Response:
    """OpenAI's createTranscription."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    """OpenAI's createTranslation."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    options, engine = _options(), _engine()
    async with contextlib.AsyncExitStack() as cleanup:
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
        if not wanted.stream:
            return await while_connected(request, _whole(work, wanted, engine))
        events = _events(work, wanted, engine)
        # The first event tells whether the audio can be read, while a status can.
        first = await while_connected(request, _first(events))
        return event_stream(_then(first, events, cleanup.pop_all()))
    raise AssertionError("not reached")


async def _whole(
    work: Transcription, wanted: TranscriptionRequest, engine: WhisperEngine
) -> Response:
    async with contextlib.aclosing(work.run()) as events:
        async for found in events:
            if isinstance(found, Transcript):
                body = _body(found, wanted, engine)
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
            async for found in events:
                if (line := _event(found, wanted, engine)) is not None:
                    started = True
                    yield line
    except Exception as error:
        if not started:
            raise
        yield event(_refusal(error).body())


def _event(
    found: Delta | Progress | Transcript, wanted: TranscriptionRequest, engine: WhisperEngine
) -> str | None:
    """What has been found as one of OpenAI's events; None where the client did not ask for it."""
    if isinstance(found, Delta):
        return event({"type": "transcript.text.delta", "delta": found.text})
    if isinstance(found, Progress):
        if not wanted.progress:
            return None
        return event({"type": "transcript.progress", "seconds": round(found.seconds, 2)})
    done: dict[str, Any] = {
        "type": "transcript.text.done",
        "text": found.text,
        "usage": formats.token_usage(found),
    }
    if wanted.logprobs:
        done["logprobs"] = formats.logprobs(found.logprobs, engine.vocabulary)
    if wanted.progress:
        done["result"] = _body(found, wanted, engine)
    return event(done)


async def _then(
    first: str, events: AsyncGenerator[str], cleanup: contextlib.AsyncExitStack
) -> AsyncGenerator[str]:
    async with cleanup, contextlib.aclosing(events):
        yield first
        async for line in events:
            yield line


async def _first(events: AsyncGenerator[str]) -> str:
    return await anext(events)


def _refusal(error: Exception) -> ApiError:
    """An error of a transcription as OpenAI's API would give it."""
    if isinstance(error, AudioTooLong):
        return ApiError(str(error), 400, "file", "audio_too_long")
    if isinstance(error, AudioError):
        return ApiError(str(error), 400, "file", "invalid_value")
    if isinstance(error, DecodersBusy):
        return ApiError(str(error), 503, "file", "server_busy")
    if isinstance(error, ValueError):  # SGLang's, and those of custom_params
        return ApiError(str(error), 400)
    return refusal(error, "a transcription")


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
    return WhisperEngine(tokenizer_manager())


@cache
def serves_whisper() -> bool:
    """Whether the served model is a Whisper."""
    config = getattr(tokenizer_manager(), "model_config", None)
    return ARCHITECTURE in (getattr(config and config.hf_config, "architectures", None) or ())
