"""A transcript in the formats of OpenAI's audio API: json, text, verbose_json, srt, vtt."""

import math
from collections.abc import Sequence
from typing import Any

from speech.prompts import WhisperVocabulary, language_name
from speech.segments import Segment, Transcript

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
TIMED = frozenset({"verbose_json", "srt", "vtt"})
"""The formats that need segments with times."""

MEDIA_TYPES = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "text/plain; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}


def to_json(transcript: Transcript, vocabulary: WhisperVocabulary | None = None) -> dict[str, Any]:
    """OpenAI's Transcription object; with a vocabulary, the tokens' log probabilities too."""
    body: dict[str, Any] = {"text": transcript.text, "usage": _duration_usage(transcript)}
    if vocabulary is not None:
        body["logprobs"] = logprobs(transcript.logprobs, vocabulary)
    return body


def to_verbose_json(transcript: Transcript, granularities: Sequence[str]) -> dict[str, Any]:
    """OpenAI's TranscriptionVerbose object.

    Args:
        granularities: "segment", "word" or both.
    """
    translated = transcript.task == "translate"
    body: dict[str, Any] = {
        "task": transcript.task,
        "language": "english" if translated else language_name(transcript.language),
        "duration": round(transcript.duration, 2),
        "text": transcript.text,
    }
    if "segment" in granularities:
        body["segments"] = [_segment(segment) for segment in transcript.segments]
    if "word" in granularities:
        body["words"] = [
            {"word": w.word, "start": round(w.start, 2), "end": round(w.end, 2)}
            for w in transcript.words
        ]
    body["usage"] = _duration_usage(transcript)
    return body


def to_text(transcript: Transcript) -> str:
    """The text and a line end."""
    return transcript.text + "\n"


def to_srt(segments: Sequence[Segment]) -> str:
    """SubRip: numbered cues with times as 00:00:01,500."""
    cues = (
        f"{number}\n{timestamp(s.start, ',')} --> {timestamp(s.end, ',')}\n{_cue(s.text)}\n\n"
        for number, s in enumerate(segments, 1)
    )
    return "".join(cues)


def to_vtt(segments: Sequence[Segment]) -> str:
    """WebVTT: cues with times as 00:00:01.500."""
    cues = (
        f"{timestamp(s.start, '.')} --> {timestamp(s.end, '.')}\n"
        f"{_cue(s.text).replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')}\n\n"
        for s in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def token_usage(transcript: Transcript) -> dict[str, Any]:
    """OpenAI's usage object of a stream's last event; audio counts ten tokens a second."""
    audio = math.ceil(transcript.duration * 10)
    text, output = transcript.prompt_tokens, transcript.output_tokens
    return {
        "type": "tokens",
        "input_tokens": audio + text,
        "input_token_details": {"audio_tokens": audio, "text_tokens": text},
        "output_tokens": output,
        "total_tokens": audio + text + output,
    }


def logprobs(
    pairs: Sequence[tuple[int, float]], vocabulary: WhisperVocabulary
) -> list[dict[str, Any]]:
    """OpenAI's logprobs of (token, log probability)."""
    return [
        {
            "token": vocabulary.tokenizer.encoding.decode([token]),
            "bytes": list(vocabulary.token_bytes(token)),
            "logprob": value,
        }
        for token, value in pairs
    ]


def timestamp(seconds: float, mark: str) -> str:
    """Seconds as hh:mm:ss and milliseconds after `mark`."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


def _segment(segment: Segment) -> dict[str, Any]:
    unknown = math.isnan(segment.no_speech_prob)
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": 0.0 if unknown else segment.no_speech_prob,
    }


def _duration_usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.duration)}


def _cue(text: str) -> str:
    # A blank line would end the cue, an arrow would look like times.
    return " ".join(text.split()).replace("-->", "->")
