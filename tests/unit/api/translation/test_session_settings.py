"""Bodies of translation sessions: what is taken, and how the rest is refused."""

import asyncio
import json
import tracemalloc

import pytest

from sglang_ext.api.http import ApiError
from sglang_ext.api.languages import NAMES
from sglang_ext.api.translation import session_settings
from sglang_ext.api.translation.session_settings import (
    SessionSettings,
    Update,
    parse_json,
    parse_settings,
    parse_update,
    read_json,
)

LANGUAGES = {"source_language": "en", "target_language": "Brazilian Portuguese"}
MODELS = ["fake", "/models/fake"]


def test_null_is_the_default_and_codes_become_names():
    names = ("template", "beta", "mask", "realign", "temperature", "seed", "model", "metadata")
    settings = parse_settings(LANGUAGES | dict.fromkeys(names), MODELS)
    assert settings == SessionSettings(**LANGUAGES)
    assert settings.source_language == "English" and settings.mask == 0
    assert parse_settings(LANGUAGES | {"source_language": "FR"}, MODELS).source_language == "French"
    assert len(NAMES) == 183 and all(len(c) == 2 and n[0].isupper() for c, n in NAMES.items())


def test_all_settings_are_read():
    given = {
        "template": "{target_language}: {source}",
        "beta": 1,
        "mask": 5,
        "trim_draft": 2,
        "realign": False,
        "retrieve": False,
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": -3,
        "model": "/models/fake",
        "metadata": {"talk": "7"},
    }
    settings = parse_settings(LANGUAGES | given, MODELS)
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"beta": 1.01}, "beta", "beta must be a number from 0 to 1, got 1.01"),
        ({"beta": -1}, "beta", "beta"),
        ({"beta": float("nan")}, "beta", "beta"),
        ({"beta": "0.2"}, "beta", "got '0.2'"),
        ({"beta": True}, "beta", "beta"),
        ({"beta": 10**400}, "beta", "beta"),
        ({"mask": 1.5}, "mask", "mask must be a whole number of at least 0"),
        ({"mask": -1}, "mask", "mask"),
        ({"trim_draft": "2"}, "trim_draft", "trim_draft"),
        ({"realign": 1}, "realign", "realign must be true or false, got 1"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"seed": 1 << 63}, "seed", "seed"),
        ({"source_language": "xq"}, "source_language", "name or ISO 639-1 code, got 'xq'"),
        ({"target_language": None}, "target_language", "target_language must be"),
        ({"target_language": "a\nb c"}, "target_language", "target_language"),
        ({"target_language": "x" * 65}, "target_language", "target_language"),
        ({"template": "Translate"}, "template", "{source} once"),
        ({"template": "{source}{source}"}, "template", "{source} once"),
        ({"template": "{source}" + "x" * 8000}, "template", "at most 8000"),
        ({"template": "\ud800{source}"}, "template", "valid Unicode"),
        ({"metadata": {"a": 1}}, "metadata", "metadata"),
        ({"metadata": {"a": "\udfff"}}, "metadata", "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
        ({"model": "gpt"}, "model", "does not exist; this server has 'fake'"),
        ({"betta": 1}, "betta", "unknown field 'betta'; known: source_language"),
        ({"\ud800": 1}, None, "unknown field"),
    ],
)
def test_what_is_wrong_is_named(body, param, message):
    with pytest.raises(ApiError) as raised:
        parse_settings(LANGUAGES | body, MODELS)
    assert message in str(raised.value) and raised.value.param == param
    assert raised.value.status == (404 if param == "model" else 400)
    json.dumps(raised.value.body(), ensure_ascii=False).encode()


def test_an_update_appends_replaces_or_revises():
    assert parse_update({"append": " b"}).applied("a", 10) == "a b"
    assert parse_update({"source": "c"}).applied("a", 10) == "c"
    assert parse_update({"source": ""}).applied("a", 10) == ""
    assert parse_update({"keep": 2, "append": "o"}).applied("hé€l", 10) == "héo"
    assert parse_update({"keep": 0, "append": ""}).applied("a", 10) == ""
    assert parse_update({"append": "x", "final": True, "stream": True}) == Update(
        None, "x", "append", True, True
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "append"),
        ({"keep": 3}, "append"),
        ({"append": "a", "source": "b"}, "source"),
        ({"source": "b", "keep": 1}, "keep"),
        ({"keep": -1, "append": "a"}, "keep"),
        ({"keep": True, "append": "a"}, "keep"),
        ({"append": ["a"]}, "append"),
        ({"append": "\ud83d"}, "append"),
        ({"append": "a", "final": "yes"}, "final"),
        ({"append": "a", "beta": 0.1}, "beta"),
    ],
)
def test_a_wrong_update_is_refused(body, param):
    with pytest.raises(ApiError) as raised:
        parse_update(body)
    assert raised.value.status == 400 and raised.value.param == param


def test_a_source_that_grows_too_long_names_its_field():
    for body, param in (({"append": "xx"}, "append"), ({"source": "xxxx"}, "source")):
        with pytest.raises(ApiError, match="would have 4 characters; this server takes 3") as got:
            parse_update(body).applied("ab", 3)
        assert (got.value.status, got.value.param) == (413, param)
    with pytest.raises(ApiError, match="keep must be at most 2") as got:
        parse_update({"keep": 3, "append": ""}).applied("ab", 3)
    assert (got.value.status, got.value.param) == (400, "keep")


@pytest.mark.parametrize("text", ["", "[1]", "{", b"\xff", "[" * 100_000, '{"a": ' + "9" * 9999])
def test_a_body_that_is_no_json_object(text):
    with pytest.raises(ApiError) as raised:
        parse_json(text)
    assert raised.value.status == 400


class SlowBody:
    """A request whose body is so many blocks of 64 KiB."""

    def __init__(self, blocks, pause=0.0):
        self.blocks, self.pause = blocks, pause
        self.read = 0

    async def stream(self):
        for _ in range(self.blocks):
            await asyncio.sleep(self.pause)
            self.read += 1
            yield bytes(1 << 16)


def test_a_body_that_is_too_large_is_read_and_not_kept():
    request = SlowBody(500)
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="larger than the 100000 bytes") as raised:
            asyncio.run(read_json(request, 100_000))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert raised.value.status == 413 and request.read == 500


@pytest.mark.parametrize(("limit", "status"), [(100_000, 413), (1 << 30, 408)])
def test_a_body_that_does_not_end_is_given_up(limit, status, monkeypatch):
    monkeypatch.setattr(session_settings, "_BODY_S", 0.1)
    with pytest.raises(ApiError, match="did not come within") as raised:
        asyncio.run(read_json(SlowBody(1000, 0.005), limit))
    assert raised.value.status == status
