"""A translation session's settings: OpenAI's, those of a transcription session, and our own.

OpenAI's session.update of a translation session names audio.output.language,
audio.input.transcription and audio.input.noise_reduction. Here audio.input may have what a
transcription session's has besides (format, turn_detection).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sglang_ext.api.http import ApiError
from sglang_ext.api.languages import NAMES
from sglang_ext.api.realtime.realtime_settings import SessionSettings, SettingsParser
from sglang_ext.api.realtime.settings_fields import (
    ECHOED,
    EXTENSION,
    Extension,
    Given,
    NoiseReduction,
    checked,
    extension_of,
    known_fields,
    object_of,
    wrong,
)
from sglang_ext.api.translation.session_settings import LANGUAGE, MOST_MASKED, Language
from sglang_ext.request_options import shown
from speech.prompts import WhisperVocabulary

_INPUT = ("format", "transcription", "turn_detection", "noise_reduction")
_CODES = {name.casefold(): code for code, name in NAMES.items()}


@dataclass(frozen=True)
class TranslationSettings(SessionSettings):
    """What a session transcribes, and what it makes of it.

    Attributes:
        target: the language to translate into, its English name; None: nothing is translated.
        shows_source: what was said is told, too (audio.input.transcription is there).
        finished_only: sentences are translated once they are finished.
        mask: so many words at the end of an unfinished translation are not shown before they are
            settled: they change most.
        beta: bias towards the last translation, 0 to 1; None: the text server's.
        transcription_events: those of /v1/realtime are sent, too.
    """

    target: str | None = None
    shows_source: bool = False
    finished_only: bool = False
    mask: int = 3
    beta: float | None = None
    transcription_events: bool = False

    @property
    def target_code(self) -> str | None:
        """ISO 639-1 code of the target language; None: there is none, or it has no code."""
        return None if self.target is None else _CODES.get(self.target.casefold())


class TranslationExtension(Extension):
    """session.sglang_ext: what OpenAI's API lacks."""

    finished_only: bool | None = None
    mask: int | None = Field(None, ge=0, le=MOST_MASKED)
    beta: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    transcription_events: bool | None = None


class _Output(BaseModel):
    """session.audio.output."""

    model_config = ConfigDict(strict=True)

    language: Language | None = Field(None, description=f"{LANGUAGE}, or null")


class _NoiseReduction(NoiseReduction):
    """session.audio.input.noise_reduction."""

    strength: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)


class TranslationParser(SettingsParser):
    """Reads updates of translation sessions.

    Args:
        vocabulary, models, default, guided: as SettingsParser's.
        text_server: whether there is one. Without it Whisper translates by itself, into English.
    """

    default: TranslationSettings

    def __init__(
        self,
        vocabulary: WhisperVocabulary,
        models: Sequence[str],
        default: SessionSettings,
        guided: bool = False,
        text_server: bool = True,
    ):
        super().__init__(vocabulary, models, TranslationSettings(**vars(default)), guided)
        self._text_server = text_server

    def updated(self, event: Mapping[str, Any], now: SessionSettings) -> TranslationSettings:
        """The settings after an update.

        Raises:
            ApiError: the field that is wrong, and what was expected.
        """
        assert isinstance(now, TranslationSettings)
        session = object_of(event, "session", "session")
        if session is None:
            raise ApiError("the event has no session", param="session")
        if session.get("type", "translation") != "translation":
            raise wrong("session.type", "translation, or left out", session["type"])
        known_fields(session, ("type", "audio", "model", EXTENSION, *ECHOED), "session")
        if "model" in session:
            model = session["model"]
            if model is not None and not isinstance(model, str):
                raise wrong("session.model", "text or null", model)
            self.check_model(model, "session.model")
        audio = object_of(session, "audio", "session.audio") or {}
        known_fields(audio, ("input", "output"), "session.audio")
        given = object_of(audio, "input", "session.audio.input") or {}
        known_fields(given, _INPUT, "session.audio.input")
        made = self._with_input(given, now)
        if "output" in audio:
            output = checked(_Output, audio["output"] or {}, "session.audio.output")
            if "language" in output.model_fields_set or audio["output"] is None:
                made = self._with_target(output.language, made)
        return self._with_extension(extension_of(session), made)

    def _with_target(self, target: str | None, now: TranslationSettings) -> TranslationSettings:
        made = replace(now, target=target, task="transcribe")
        if target is None or self._text_server:
            return made
        if made.target_code != "en":
            raise ApiError(
                f"this server translates into English alone, got {shown(target)}: for other "
                "languages start it with --translate-with URL, the address of a text server",
                param="session.audio.output.language",
                code="not_supported",
            )
        return replace(made, task="translate")

    def _with_input(
        self, given: Mapping[str, Any], now: TranslationSettings
    ) -> TranslationSettings:
        made: SessionSettings = now
        for name in _INPUT:
            if name not in given:
                continue
            path, value = f"session.audio.input.{name}", given[name]
            if name == "noise_reduction":
                if value is not None:
                    checked(_NoiseReduction, value, path)
                continue
            if name == "turn_detection" and value is None:
                raise wrong(path, "server_vad: a translation session has no commits", value)
            made = self.field(name, value, path, made)
        assert isinstance(made, TranslationSettings)
        shows = given["transcription"] is not None if "transcription" in given else now.shows_source
        return replace(made, shows_source=shows)

    def _with_extension(self, given: Given, now: TranslationSettings) -> TranslationSettings:
        for path, value in given.values():
            fields = checked(TranslationExtension, value or {}, path)
            made = self.extended(fields, path, now)
            assert isinstance(made, TranslationSettings)
            now = made
            for name in ("finished_only", "mask", "beta", "transcription_events"):
                if name in fields.model_fields_set:
                    found = getattr(fields, name)
                    now = replace(
                        now, **{name: getattr(self.default, name) if found is None else found}
                    )
        return now

    def described(
        self, settings: SessionSettings, session_id: str, beta: bool = False
    ) -> dict[str, Any]:
        """The session as OpenAI's API shows it."""
        assert isinstance(settings, TranslationSettings)
        spoken = super().described(settings, session_id, beta=False)
        given = spoken["audio"]["input"]
        model = given["transcription"]["model"]
        if not settings.shows_source:
            given = given | {"transcription": None}
        names = ("finished_only", "mask", "beta", "transcription_events")
        return {
            "id": session_id,
            "type": "translation",
            "object": "realtime.translation_session",
            "model": model,
            "expires_at": 0,  # never
            "audio": {
                "input": given,
                "output": {"language": settings.target_code or settings.target},
            },
            EXTENSION: spoken[EXTENSION] | {name: getattr(settings, name) for name in names},
        }
