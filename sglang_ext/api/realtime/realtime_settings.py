"""A transcription session's settings: OpenAI's, in the shape of its API and of the beta before it.

`session.update` has them under session.audio.input, `transcription_session.update` (beta) as
session.input_audio_format and its like. What an update leaves out stays as it was, null is the
default of what it stands for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_ext.api.http import ApiError, model_not_found
from sglang_ext.api.realtime.settings_fields import (
    ALIGNATT,
    EXTENSION,
    LOCAL_AGREEMENT,
    AudioFormat,
    Extension,
    NoiseReduction,
    Transcription,
    Vad,
    beta_fields,
    check_include,
    checked,
    ga_fields,
    object_of,
    replace_param,
    wrong,
)
from sglang_ext.request_options import shown
from speech.agreement import CommitPolicy, LocalAgreement
from speech.alignatt import AlignAtt
from speech.prompts import LanguageError, WhisperVocabulary
from speech.wire_audio import (
    ALAW,
    DEFAULT_FORMAT,
    G711_RATE,
    PCM,
    PCM_RATES,
    ULAW,
    WireFormat,
)

GA, BETA = "session.update", "transcription_session.update"
"""The events that change settings."""

# Seconds: AlignAtt needs no second hypothesis, so that each one is worth making.
_STEPS = {LOCAL_AGREEMENT: 1.0, ALIGNATT: 0.3}
_BETA_FORMATS = {
    "pcm16": DEFAULT_FORMAT,
    "g711_ulaw": WireFormat(ULAW, G711_RATE),
    "g711_alaw": WireFormat(ALAW, G711_RATE),
}


@dataclass(frozen=True)
class TurnDetection:
    """OpenAI's server_vad.

    Attributes:
        threshold: least probability of speech, 0 to 1.
        prefix_padding_ms: audio that a turn has before its speech.
        silence_duration_ms: so long a silence ends a turn.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


@dataclass(frozen=True)
class LivePolicy:
    """When words are settled.

    Attributes:
        name: localagreement (speech/agreement.py) or alignatt (speech/alignatt.py).
        frames: of 20 ms, that alignatt wants behind a word.
        step_s: seconds of new audio after which it is transcribed again; 0: the policy's default.
        padding_s: seconds of silence that are encoded behind audio that will be heard again.
    """

    name: str = LOCAL_AGREEMENT
    frames: int = 20
    step_s: float = 0.0
    padding_s: float = 7.0

    @property
    def steps(self) -> float:
        """Seconds of new audio after which it is transcribed again."""
        return self.step_s or _STEPS[self.name]

    def made(self) -> CommitPolicy:
        """The policy, for a stretch of audio."""
        return AlignAtt(self.frames) if self.name == ALIGNATT else LocalAgreement()


@dataclass(frozen=True)
class SessionSettings:
    """What a session's audio is, and how it is transcribed.

    Attributes:
        language: ISO code; None: detected in each item.
        prompt: names and words that may come up.
        turn_detection: None: the client commits.
        policy: when words are settled, and how often it is transcribed again.
        task: "transcribe", or "translate" (Whisper's own, into English).
        view: the name under which others may watch; None: nobody may.
        least_probability: of speech, where there is no turn detection.
    """

    wire: WireFormat = DEFAULT_FORMAT
    language: str | None = None
    prompt: str = ""
    turn_detection: TurnDetection | None = TurnDetection()
    policy: LivePolicy = LivePolicy()
    least_probability: float = 0.5
    task: str = "transcribe"
    view: str | None = None

    @property
    def threshold(self) -> float:
        """Least probability of speech, 0 to 1."""
        vad = self.turn_detection
        return self.least_probability if vad is None else vad.threshold


class SettingsParser:
    """Reads updates.

    Args:
        vocabulary: of the served model.
        models: names of the served model, the public one first.
        default: settings that no update has named.
        guided: whether the server tells what tokens attend to, which alignatt needs.
    """

    def __init__(
        self,
        vocabulary: WhisperVocabulary,
        models: Sequence[str],
        default: SessionSettings,
        guided: bool = False,
    ):
        self._guided = guided
        self._vocabulary = vocabulary
        self._models = models
        language = None if vocabulary.multilingual else "en"
        self.default = replace(default, language=language)

    def check_model(self, model: str | None, param: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: 404.
        """
        if model and model not in self._models:
            raise replace_param(model_not_found(shown(model), shown(self._models[0])), param)

    def updated(self, event: Mapping[str, Any], now: SessionSettings) -> SessionSettings:
        """The settings after an update.

        Args:
            event: of type GA or BETA.

        Raises:
            ApiError: the field that is wrong, and what was expected.
        """
        session = object_of(event, "session", "session")
        if session is None:
            raise ApiError("the event has no session", param="session")
        beta = event["type"] == BETA
        given = beta_fields(session) if beta else ga_fields(session)
        check_include(session)
        for name, (path, value) in given.items():
            now = self.field("beta_format" if beta and name == "format" else name, value, path, now)
        return now

    def field(self, name: str, value: Any, path: str, now: SessionSettings) -> SessionSettings:
        """The settings, of the same class, after the update of one field.

        Args:
            name: of session.audio.input, or EXTENSION.
            path: where it stood.

        Raises:
            ApiError: it is wrong; what was expected.
        """
        takes: dict[str, Callable[[Any, str, SessionSettings], SessionSettings]] = {
            "beta_format": self._beta_format,
            "format": self._format,
            "transcription": self._transcription,
            "turn_detection": self._turn_detection,
            "noise_reduction": _noise_reduction,
            EXTENSION: self._extension,
        }
        return takes[name](value, path, now)

    def _beta_format(self, value: Any, path: str, now: SessionSettings) -> SessionSettings:
        if value is None:
            return replace(now, wire=DEFAULT_FORMAT)
        if not isinstance(value, str) or value not in _BETA_FORMATS:
            raise wrong(path, f"one of {', '.join(_BETA_FORMATS)}", value)
        return replace(now, wire=_BETA_FORMATS[value])

    def _format(self, value: Any, path: str, now: SessionSettings) -> SessionSettings:
        if value is None:
            return replace(now, wire=DEFAULT_FORMAT)
        fields = checked(AudioFormat, value, path)
        rates = PCM_RATES if fields.type == PCM else (G711_RATE,)
        default = DEFAULT_FORMAT.rate if fields.type == PCM else G711_RATE
        rate = default if fields.rate is None else fields.rate
        if rate not in rates:
            raise wrong(f"{path}.rate", f"one of {', '.join(map(str, rates))}", rate)
        return replace(now, wire=WireFormat(fields.type, rate))

    def _transcription(self, value: Any, path: str, now: SessionSettings) -> SessionSettings:
        if value is None:
            return replace(now, language=self.default.language, prompt="")
        fields = checked(Transcription, value, path)
        given = fields.model_fields_set
        self.check_model(fields.model, f"{path}.model")
        if "language" in given:
            now = replace(now, language=self._language(fields.language, f"{path}.language"))
        if "prompt" in given:
            now = replace(now, prompt=fields.prompt or "")
        return now

    def _language(self, language: str | None, path: str) -> str | None:
        if not language:
            return self.default.language
        try:
            return self._vocabulary.language_code(language)
        except LanguageError as error:
            raise ApiError(str(error), param=path, code="invalid_language_format") from None

    def _turn_detection(self, value: Any, path: str, now: SessionSettings) -> SessionSettings:
        if value is None:
            return replace(now, turn_detection=None)
        fields = checked(Vad, value, path)
        names = ("threshold", "prefix_padding_ms", "silence_duration_ms")
        given = {name: getattr(fields, name) for name in names if name in fields.model_fields_set}
        default = self.default.turn_detection or TurnDetection()
        before = now.turn_detection or default
        taken = {n: getattr(default, n) if value is None else value for n, value in given.items()}
        return replace(now, turn_detection=replace(before, **taken))

    def _extension(self, value: Any, path: str, now: SessionSettings) -> SessionSettings:
        if value is None:
            return replace(now, policy=self.default.policy, view=None)
        return self.extended(checked(Extension, value, path), path, now)

    def extended(self, fields: Extension, path: str, now: SessionSettings) -> SessionSettings:
        """The settings after an update of our own fields, which stand at `path`.

        Raises:
            ApiError: alignatt, where the server cannot do it.
        """
        default, given = self.default.policy, fields.model_fields_set
        taken: dict[str, Any] = {}
        if "step_ms" in given:
            taken["step_s"] = default.step_s if fields.step_ms is None else fields.step_ms / 1000
        if "padding_ms" in given:
            padding = fields.padding_ms
            taken["padding_s"] = default.padding_s if padding is None else padding / 1000
        if "live_policy" in given:
            taken["name"] = fields.live_policy or default.name
        if "alignatt_frames" in given:
            frames = fields.alignatt_frames
            taken["frames"] = default.frames if frames is None else frames
        if taken.get("name") == ALIGNATT and not self._guided:
            raise ApiError(
                "this server does not tell what tokens attend to, which alignatt needs: it takes "
                "--speculative-algorithm SSSD and a CPU; localagreement needs neither",
                param=f"{path}.live_policy",
                code="not_supported",
            )
        now = replace(now, policy=replace(now.policy, **taken))
        return replace(now, view=fields.view) if "view" in given else now

    def described(self, settings: SessionSettings, session_id: str, beta: bool) -> dict[str, Any]:
        """The session as OpenAI's API shows it."""
        vad = settings.turn_detection
        turn_detection = None if vad is None else {"type": "server_vad", **vars(vad)}
        transcription = {
            "model": self._models[0],
            "language": settings.language,
            "prompt": settings.prompt,
        }
        shared: dict[str, Any] = {
            "id": session_id,
            "object": "realtime.transcription_session",
            "include": None,
            EXTENSION: {
                "step_ms": round(settings.policy.steps * 1000),
                "live_policy": settings.policy.name,
                "alignatt_frames": settings.policy.frames,
                "padding_ms": round(settings.policy.padding_s * 1000),
                "view": settings.view,
            },
        }
        if beta:
            return shared | {
                "input_audio_format": _beta_name(settings.wire),
                "input_audio_transcription": transcription,
                "input_audio_noise_reduction": None,
                "turn_detection": turn_detection,
            }
        given = {
            "format": {"type": settings.wire.kind, "rate": settings.wire.rate},
            "transcription": transcription,
            "noise_reduction": None,
            "turn_detection": turn_detection,
        }
        return shared | {"type": "transcription", "audio": {"input": given}}


def _noise_reduction(value: Any, path: str, now: SessionSettings) -> SessionSettings:
    """Any is taken and none is done, which the null of the answer tells; Whisper itself holds up in
    noise (Radford et al. 2022, section 3.7)."""
    if value is not None:
        checked(NoiseReduction, value, path)
    return now


def _beta_name(wire: WireFormat) -> str:
    """pcm16 at whatever rate, as the beta knew one alone."""
    return next((name for name, known in _BETA_FORMATS.items() if known.kind == wire.kind), "pcm16")
