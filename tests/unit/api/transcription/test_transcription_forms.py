"""Forms whose values are out of all bounds are refused, each by its field."""

import asyncio
import io
import json

import pytest
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from sglang_ext.api.http import ApiError
from sglang_ext.api.transcription.transcription_request import TranscriptionRequest, parse
from sglang_ext.api.transcription.transcriptions import _refusal
from sglang_ext.api.transcription.uploads import read_form
from speech.audio_errors import DecodersBusy
from speech.prompts import WhisperVocabulary

VOCABULARY = WhisperVocabulary(51_865)
DEEP = 100_000


def parsed(**fields: str) -> TranscriptionRequest:
    file = UploadFile(io.BytesIO(b"x"), size=1)
    form = FormData({"model": "whisper", "file": file} | fields)
    return parse(form, "transcribe", VOCABULARY, ["whisper"])


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def vad(value: str) -> str:
    return f'{{"type": "server_vad", "threshold": {value}}}'


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunking_strategy", vad("9" * 400)),
        ("chunking_strategy", vad("-" + "9" * 400)),
        ("chunking_strategy", vad("9" * 10_000)),
        ("chunking_strategy", vad("1e999")),
        ("chunking_strategy", vad("NaN")),
        ("chunking_strategy", vad("[0.5]")),
        ("chunking_strategy", "[" * DEEP),
        ("chunking_strategy", vad("[" * DEEP + "]" * DEEP)),
        ("custom_params", nested(DEEP)),
        ("custom_params", nested(33)),
        ("custom_params", '{"a": ' + "[" * 32 + "]" * 32 + "}"),
        ("temperature", "9" * 400),
        ("temperature", "1e999"),
    ],
)
def test_what_is_out_of_all_bounds_is_refused_by_its_field(name, value):
    with pytest.raises(ApiError) as raised:
        parsed(**{name: value})
    assert (raised.value.status, raised.value.param) == (400, name)


@pytest.mark.parametrize(
    ("name", "value", "code", "message"),
    [
        ("language", "xx", "invalid_language_format", "unknown language 'xx'.*'en'.*'english'"),
        ("language", "<|en|>", "invalid_language_format", r"unknown language '<\|en\|>'"),
        ("language", "yue", "invalid_language_format", "does not know cantonese; it knows 99"),
        ("timestamp_granularities[]", "line", "invalid_value", "segment and word, got 'line'"),
        ("timestamp_granularities", "Word", "invalid_value", "segment and word, got 'Word'"),
    ],
)
def test_unknown_languages_and_granularities_are_named_with_what_is_allowed(
    name, value, code, message
):
    with pytest.raises(ApiError, match=message) as raised:
        parsed(response_format="verbose_json", **{name: value})
    body = raised.value.body()["error"]
    assert raised.value.status == 400
    assert (body["param"], body["code"]) == (name.removesuffix("[]"), code)


def test_a_granularity_that_is_a_file_is_refused():
    with pytest.raises(ApiError, match="timestamp_granularities must be text"):
        parsed(**{"timestamp_granularities[]": UploadFile(io.BytesIO(b"word"), size=4)})


def test_known_languages_and_granularities_are_taken():
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    wanted = parsed(language="French", **fields)
    assert (wanted.language, wanted.granularities, wanted.words) == ("fr", ("word",), True)


def test_what_is_within_them_is_taken():
    assert parsed(chunking_strategy=vad("0.25")).threshold == 0.25
    assert parsed(custom_params=nested(32)).custom_params == json.loads(nested(32))


@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-7", "utf-16", "undefined", "hex"])
def test_charsets_that_do_not_fit_are_no_servers_fault(charset):
    body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff..-\xd8\r\n--b--\r\n'
    kind = f"multipart/form-data; boundary=b; charset={charset}".encode()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind)]}

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        form = asyncio.run(read_form(Request(scope, receive), 1 << 20))
        with pytest.raises(ApiError) as raised:
            parse(form, "transcribe", VOCABULARY, ["whisper"])
        error = raised.value
    except ApiError as refused:
        error = refused
    assert error.status in (400, 404)
    assert error.response().body


def test_half_a_character_can_be_named_in_an_error():
    with pytest.raises(ApiError) as raised:
        parsed(model="\ud800")
    assert b"does not exist" in raised.value.response().body


def test_a_full_queue_is_a_503_in_openais_shape():
    refused = _refusal(DecodersBusy("too many"))
    assert refused.status == 503
    assert refused.body()["error"] == {
        "message": "too many",
        "type": "server_error",
        "param": "file",
        "code": "server_busy",
    }
