"""The formats parse as what they claim to be."""

import math
import re

import pytest
from openai.types.audio import Transcription, TranscriptionVerbose

from speech.formats import (
    logprobs,
    timestamp,
    to_json,
    to_srt,
    to_text,
    to_verbose_json,
    to_vtt,
    token_usage,
)
from speech.prompts import WhisperVocabulary
from speech.segments import Segment, Transcript, Word


def segment(number: int, start: float, end: float, text: str) -> Segment:
    return Segment(number, 0, start, end, text, (1, 2), 0.0, -0.3, 1.2, math.nan)


TRANSCRIPT = Transcript(
    "transcribe", "fr", 12.34, "Un. Deux <b>.",
    [segment(0, 0.0, 1.5, " Un."), segment(1, 3725.0, 3726.999, " Deux\n\n<b> --> .")],
    [Word("Un.", 0.0, 1.5)],
    prompt_tokens=4, output_tokens=9,
)  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "00:00:00,000"),
        (1.5, "00:00:01,500"),
        (59.9996, "00:01:00,000"),
        (36_001, "10:00:01,000"),
    ],
)
def test_timestamps(seconds, expected):
    assert timestamp(seconds, ",") == expected


def test_srt():
    assert to_srt(TRANSCRIPT.segments) == (
        "1\n00:00:00,000 --> 00:00:01,500\nUn.\n\n"
        "2\n01:02:05,000 --> 01:02:06,999\nDeux <b> -> .\n\n"
    )
    assert to_srt([]) == ""


def test_vtt():
    assert to_vtt(TRANSCRIPT.segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nUn.\n\n"
        "01:02:05.000 --> 01:02:06.999\nDeux &lt;b&gt; -&gt; .\n\n"
    )
    assert re.fullmatch(r"WEBVTT\s*", to_vtt([]))


def test_json_is_openais():
    body = Transcription.model_validate(to_json(TRANSCRIPT))
    assert body.text == TRANSCRIPT.text
    assert body.usage is not None and body.usage.type == "duration" and body.usage.seconds == 13
    assert to_text(TRANSCRIPT) == TRANSCRIPT.text + "\n"


def test_verbose_json_is_openais():
    body = to_verbose_json(TRANSCRIPT, ("segment", "word"))
    assert body["task"] == "transcribe"
    parsed = TranscriptionVerbose.model_validate(body)
    assert (parsed.language, parsed.duration) == ("french", 12.34)
    assert parsed.segments is not None and parsed.words is not None
    assert [s.end for s in parsed.segments] == [1.5, 3726.999]
    assert parsed.segments[0].no_speech_prob == 0.0
    assert parsed.words[0].word == "Un."
    assert "words" not in to_verbose_json(TRANSCRIPT, ("segment",))
    assert "segments" not in to_verbose_json(TRANSCRIPT, ("word",))


def test_a_translation_is_in_english():
    translated = Transcript("translate", "fr", 1.0, "One.")
    assert to_verbose_json(translated, ("segment",))["language"] == "english"


def test_token_usage_adds_up():
    usage = token_usage(TRANSCRIPT)
    assert usage["input_tokens"] == 124 + 4
    assert usage["total_tokens"] == 128 + 9


def test_logprobs_give_bytes_where_a_token_is_no_whole_character():
    vocabulary = WhisperVocabulary(51_865)
    tokens = vocabulary.tokenizer.encode(" 𝄞")
    entries = logprobs([(token, -0.1) for token in tokens], vocabulary)
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == " 𝄞"
