"""Prompts, requests and outputs of the translator, on a tokenizer of bytes."""

import asyncio

import pytest
from fastapi import HTTPException

from sglang_ext.api.http import ApiError
from sglang_ext.api.translation.session_settings import SessionSettings
from sglang_ext.api.translation.translator import Translation, Translator
from tests.unit.api.fake_manager import EOS, FakeManager

LANGUAGES = {"source_language": "English", "target_language": "French"}
SETTINGS = SessionSettings(**LANGUAGES, template="{target_language}:\n{source}")


def translate(manager, source, settings=SETTINGS, draft=(), on_text=None, ingest=None):
    translator = Translator(manager, {"enable_thinking": True, "style": "x"})
    return asyncio.run(
        translator.translate(settings, source, draft, "acme", ingest=ingest, on_text=on_text)
    )


def test_the_source_ends_the_user_message_and_is_not_a_template(manager):
    translate(manager, " {target_language} {0} ")
    prompt = manager.tokenizer.decode(manager.requests[0].input_ids)
    assert prompt == "<user>French:\n{target_language} {0}<assistant>"
    assert manager.tokenizer.template_options == {"enable_thinking": False, "style": "x"}


def test_a_grown_source_keeps_the_prompt_before_it(manager):
    default = SessionSettings(**LANGUAGES)
    translate(manager, "the cat", default)
    translate(manager, "the cat sat", default)
    first, second = (r.input_ids for r in manager.requests)
    assert second[: len(first) - 1] == first[:-1]
    assert "from English to French" in manager.tokenizer.decode(first)


def test_a_model_without_chat_template_gets_the_message(manager):
    manager.tokenizer.chat_template = None
    translate(manager, "hi")
    assert manager.tokenizer.decode(manager.requests[0].input_ids) == "French:\nhi"


def test_the_request_carries_the_draft_and_the_settings(manager):
    settings = SessionSettings(
        **LANGUAGES, beta=0.0, trim_draft=2, realign=False, seed=5, temperature=0.5
    )
    translate(manager, "hi", settings, draft=(7, 8), ingest="trs-1")
    sampling = manager.requests[0].sampling_params
    assert sampling["custom_params"] == {
        "drafter": "ssbd",
        "namespace": "acme",
        "ingest": True,
        "ingest_name": "trs-1",
        "ssbd": {"draft": [7, 8], "beta": 0.0, "trim": 2, "realign": False, "retrieve": True},
    }
    assert (sampling["temperature"], sampling["top_p"], sampling["sampling_seed"]) == (0.5, 0.8, 5)
    translate(manager, "hi")
    sampling = manager.requests[1].sampling_params
    assert sampling["temperature"] == 0 and "sampling_seed" not in sampling
    assert not {"draft", "beta"} & set(sampling["custom_params"]["ssbd"])


def test_the_output_is_read_without_its_end(manager):
    made = translate(manager, "hé", draft=(1, 2, 3))
    assert made.token_ids == tuple("HÉ".encode()) and EOS not in made.token_ids
    assert made == Translation(tuple("HÉ".encode()), "HÉ", "stop", 13, 4, 3)


@pytest.mark.parametrize("incremental", [False, True])
def test_streams_give_the_whole_text_whatever_sglang_sends(incremental):
    manager = FakeManager(incremental_streaming_output=incremental)
    texts: list[str] = []
    made = translate(manager, "hello world", on_text=texts.append)
    assert texts == ["HEL", "HELLO", "HELLO WOR", "HELLO WORLD"]
    assert made.token_ids == tuple(b"HELLO WORLD") and made.text == "HELLO WORLD"


def test_max_tokens_follow_the_source_and_the_context():
    manager = FakeManager()
    translate(manager, "x" * 10)
    assert manager.requests[0].sampling_params["max_new_tokens"] == 84
    made = translate(manager, "x" * 10, SessionSettings(**LANGUAGES, max_tokens=4))
    assert (made.text, made.finish_reason) == ("XXXX", "length")
    prompt = len(manager.requests[1].input_ids)
    manager.context_len = prompt + 3
    translate(manager, "x" * 10, SessionSettings(**LANGUAGES, max_tokens=4))
    assert manager.requests[2].sampling_params["max_new_tokens"] == 3
    manager.context_len = prompt
    with pytest.raises(ApiError, match=f"has {prompt} tokens and leaves no room") as raised:
        translate(manager, "x" * 10, SessionSettings(**LANGUAGES))
    assert raised.value.code == "context_length_exceeded" and len(manager.requests) == 3


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        (ValueError("custom_params.ssbd.beta must be"), 400, "custom_params.ssbd.beta"),
        (HTTPException(503, "queue full"), 503, "queue full"),
        ({"type": "abort", "message": "too long", "status_code": 400}, 400, "too long"),
        ({"type": "abort", "message": None}, 500, "gave the request up"),
    ],
)
def test_what_sglang_refuses_is_an_api_error(fault, status, message):
    with pytest.raises(ApiError, match=message) as raised:
        translate(FakeManager(fault=fault), "hi")
    assert raised.value.status == status


@pytest.mark.parametrize(
    ("text", "mask", "stable"),
    [
        ("abcdef", 0, "abcdef"),
        ("abc def", 2, "abc "),  # a part of a word would change
        ("abc def", 3, "abc "),
        ("abc def", 4, "abc"),
        ("abc, def", 4, "abc,"),
        ("abcdef", 2, ""),
        ("abcdef", 99, ""),
        ("\u00e9 \u00e9", 1, "\u00e9 "),  # half of a character is masked
        ("\u65e5\u672c", 4, ""),
        ("\u65e5\u672c", 3, "\u65e5"),
        ("a\U0001f600b", 3, "a"),
        ("a e\u0301!", 3, "a "),  # the accent is masked, so its letter is
        ("a\U0001f469\u200d\U0001f680b", 5, "a"),  # an emoji of three characters
        ("a\U0001f469\u200d\U0001f680b", 8, "a"),
        (" a b", 1, "a "),
        ("\u0e44\u0e17\u0e22", 3, "\u0e44\u0e17"),  # Thai has no spaces between words
        ("ab ", 0, "ab"),
    ],
)
def test_the_stable_part_ends_with_a_word_or_a_character(text, mask, stable, manager):
    translator = Translator(manager)
    tokens = tuple(text.encode())
    assert translator.stable_part(Translation(tokens, text.strip()), mask) == stable


def test_the_stable_part_is_always_a_beginning_of_the_text(manager):
    text = "Où e\u0301tait \u65e5\u672c\U0001f600, \ufffd?"
    translation = Translation(tuple(text.encode()), text)
    parts = [Translator(manager).stable_part(translation, mask) for mask in range(60)]
    assert all(text.startswith(part) for part in parts)
    assert [len(p) for p in parts] == sorted((len(p) for p in parts), reverse=True)


def test_a_cancelled_translation_is_aborted(manager):
    async def run():
        manager.gate.clear()
        task = asyncio.create_task(
            Translator(manager).translate(SETTINGS, "hi", (), "acme", ingest=None)
        )
        while not manager.running:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(run())
    assert manager.aborted == [manager.requests[0].rid] and manager.running == 0
