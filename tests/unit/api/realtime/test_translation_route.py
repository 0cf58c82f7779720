"""Realtime translations, with a fake Whisper and, over its real routes, a fake text model."""

import asyncio
import base64
import contextlib
import sys
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocketDisconnect

from sglang_ext.api.realtime import realtime_route, translation_session
from sglang_ext.api.realtime.realtime_events import OUTPUT_TAIL, TAIL
from sglang_ext.api.realtime.realtime_route import TRANSLATIONS, Realtime
from sglang_ext.api.realtime.transcripts import SpokenSentences, Transcript
from sglang_ext.api.realtime.translation_session import shown_tail
from sglang_ext.api.translation import sentence_translations
from sglang_ext.api.translation.session_routes import Backend, add_routes
from sglang_ext.api.translation.session_table import SessionTable
from sglang_ext.api.translation.translator import Translator
from sglang_ext.options import Options
from speech.prompts import WhisperVocabulary
from tests.unit.api.fake_manager import FakeManager, Request
from tests.unit.api.realtime.fake_whisper import WORDS, FakeWhisper, spoken
from tests.unit.api.realtime.test_realtime_route import COMPLETED, Wire, backend, pcm, reach

INPUT, OUTPUT = "session.input_transcript.delta", "session.output_transcript.delta"
FRENCH = {"audio": {"output": {"language": "fr"}}}
BOTH = {"audio": {"output": {"language": "fr"}, "input": {"transcription": {}}}}
STEP = {"sglang_ext": {"step_ms": 200}}
APPEND = "session.input_audio_buffer.append"


class Sentences(FakeWhisper):
    """Hears sentences of so many words."""

    length = 3

    def _word(self, burst):
        word = super()._word(burst)
        place = WORDS.index(word) % self.length if word in WORDS else 1
        return word.title() if place == 0 else word + "." * (place == self.length - 1)


class TextServer:
    """Translates by upper-casing; over the routes of a text server."""

    def __init__(self):
        self.manager = FakeManager(piece=1000)
        self.table = SessionTable(100, 60, lambda: False)
        self.options = Options()
        app = FastAPI()
        add_routes(app, lambda: Backend(Translator(self.manager), self.table, self.options))
        self._app = httpx.ASGITransport(app)
        self.dead = False
        self.headers = []

    def client(self, url, key, headers):
        assert (url, key) == ("http://text:1", "secret")
        self.headers.append(headers)
        return httpx.AsyncClient(transport=self, base_url=url, headers=headers)

    async def handle_async_request(self, request):
        if self.dead:
            raise httpx.ConnectError("nobody there")
        return await self._app.handle_async_request(request)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def aclose(self):
        pass


class Translated(Wire):
    """A client of a translation session."""

    def say(self, words, silence_s=0.0, rate=24_000):
        data = pcm(spoken(words, silence_s, rate))
        for first in range(0, len(data), rate // 5):
            self.append(data[first : first + rate // 5])

    def append(self, data):
        self.send(APPEND, audio=base64.b64encode(data).decode())

    def speak(self, words):
        """Say words one by one, each when the one before was heard; the first three at once, as
        of less speech nothing is heard yet."""
        for said in (words[:3], *([word] for word in words[3:])):
            self.append(pcm(spoken(said, rate=24_000)))
            self.until(TAIL)

    def text(self, kind):
        return "".join(e["delta"] for e in self.told if e["type"] == kind)

    def of(self, kind):
        return [e for e in self.told if e["type"] == kind]

    def close(self):
        """Have the session closed; what came before that is in `told`."""
        self.send("session.close")
        self.until("session.closed")
        with pytest.raises(WebSocketDisconnect) as closed:
            self.socket.receive_json()
        assert closed.value.code == 1000


@pytest.fixture
def engine():
    return Sentences()


def reached(made, monkeypatch):
    """A text server, which every session's client reaches from now on."""
    # SGLang's requests without SGLang, which takes seconds to import.
    module = SimpleNamespace(GenerateReqInput=Request)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", module)
    monkeypatch.setattr(realtime_route, "client", made.client)
    monkeypatch.setattr(sentence_translations, "_RETRY_S", 0.01)
    return made


@pytest.fixture
def text_server(monkeypatch):
    return reached(TextServer(), monkeypatch)


@contextlib.contextmanager
def connected(engine, *sessions, **settings):
    options = {"translate_with": "http://text:1/v1/", "translate_key": "secret"}
    made = backend(engine, options=options | settings.pop("options", {}))
    app = FastAPI()
    app.router.routes.append(WebSocketRoute(TRANSLATIONS, Realtime(lambda: made).translations))
    with (
        TestClient(app) as client,
        client.websocket_connect(TRANSLATIONS, **settings) as socket,
    ):
        first = socket.receive_json()
        assert first["type"] == "session.created", first
        wire = Translated(socket, client.portal, first["session"])
        for session in sessions:
            wire.update(session)
        yield wire


def test_a_session_from_its_settings_to_its_end(engine, text_server):
    with connected(engine) as wire:
        assert wire.session["type"] == "translation" and wire.session["model"] == "fake"
        assert wire.session["audio"]["output"] == {"language": None}
        assert wire.session["audio"]["input"]["transcription"] is None
        shown = wire.update(BOTH | STEP)
        assert shown["audio"]["output"] == {"language": "fr"}
        assert shown["audio"]["input"]["transcription"]["language"] == "en"
        wire.speak(WORDS[:6])
        wire.say([], 1.0)
        wire.say(WORDS[6:9])
        wire.close()
        said = "Alpha bravo charlie. Delta echo foxtrot. Golf hotel india."
        assert wire.text(INPUT) == said and wire.text(OUTPUT) == said.upper()
        kinds = {e["type"] for e in wire.told}
        assert kinds == {
            "session.updated", INPUT, OUTPUT, TAIL, OUTPUT_TAIL, "session.closed",
        }  # fmt: skip
        for kind, deltas in ((INPUT, 5), (OUTPUT, 3)):
            places = [e["elapsed_ms"] for e in wire.of(kind)]
            assert places == sorted(places) and len(places) >= deltas, (kind, places)
            assert 250 < places[0] < 1300 and places[-1] == pytest.approx(4500, abs=150)
        sentences = [e["sglang_ext"]["sentence"] for e in wire.of(OUTPUT)]
        assert sorted(set(sentences)) == [0, 1, 2] and sentences == sorted(sentences)
    assert text_server.headers == [{}] and len(text_server.table) == 3
    settings = text_server.manager.requests[0]
    prompt = text_server.manager.tokenizer.decode(settings.input_ids)
    assert "from English to French" in prompt


@pytest.mark.parametrize("mask", [0, 3])
def test_what_is_not_settled_is_told_apart_and_what_is_stays(mask, engine, text_server):
    engine.length = 5
    with connected(engine, FRENCH, STEP) as wire:
        wire.update({"sglang_ext": {"mask": mask}})
        wire.speak(WORDS)
        wire.close()
        assert not wire.of(INPUT)  # nobody asked
        shown, tails = "", []
        said = "ALPHA BRAVO CHARLIE DELTA ECHO. FOXTROT GOLF HOTEL INDIA JULIETT."
        for event in wire.told:
            if event["type"] == OUTPUT:
                shown += event["delta"]
            elif event["type"] == OUTPUT_TAIL:
                # What is shown is the deltas and the tail behind them, spaces included.
                if not mask or event["final"]:
                    assert (shown + event["text"]).endswith(event["source"].upper())
                assert said.startswith(shown + event["text"])
                tails.append(event)
        assert [t["final"] for t in tails].count(True) == 2
        assert all(t["text"] == "" for t in tails if t["final"])
        assert any(t["text"] for t in tails) == (mask == 0)  # two words are new with each update
        assert {t["item_id"] for t in tails} == {tails[0]["item_id"]}
        # Before a sentence is finished, some of it is settled.
        firsts = [e for e in wire.of(OUTPUT) if e["sglang_ext"]["sentence"] == 1]
        assert len(firsts) > 1


def test_finished_sentences_alone(engine, text_server):
    finished = {"sglang_ext": {"finished_only": True, "step_ms": 200}}
    with connected(engine, FRENCH, finished) as wire:
        wire.speak(WORDS[:9])
        wire.close()
        assert [e["delta"] for e in wire.of(OUTPUT)] == [
            "ALPHA BRAVO CHARLIE.", " DELTA ECHO FOXTROT.", " GOLF HOTEL INDIA.",
        ]  # fmt: skip
        assert all(t["text"] == "" and t["final"] for t in wire.of(OUTPUT_TAIL))
    assert len(text_server.manager.requests) == 3


def test_a_dead_text_server_is_told_once_and_transcription_goes_on(engine, text_server):
    with connected(engine, BOTH, STEP) as wire:
        text_server.dead = True
        wire.say(WORDS[:3], 1.0)
        error = wire.until("error")["error"]
        assert (error["code"], error["type"]) == ("translation_failed", "server_error")
        assert "nobody there" in error["message"] and "goes on" in error["message"]
        wire.say(WORDS[3:6], 1.0)
        while "foxtrot." not in wire.text(INPUT):
            wire.until(INPUT, "error")
        wire.portal.call(asyncio.sleep, 0.1)  # some more tries
        text_server.dead = False
        wire.until(OUTPUT)
        wire.say(WORDS[6:9])
        wire.close()
        assert wire.text(OUTPUT) == "ALPHA BRAVO CHARLIE. DELTA ECHO FOXTROT. GOLF HOTEL INDIA."
        assert len(wire.of("error")) == 1


def test_a_text_server_that_stays_away_does_not_keep_a_session_from_closing(engine, text_server):
    with connected(engine, BOTH) as wire:
        text_server.dead = True
        wire.say(WORDS[:6])
        wire.close()
        assert wire.text(INPUT) == "Alpha bravo charlie. Delta echo foxtrot."
        assert wire.text(OUTPUT) == "" and len(wire.of("error")) == 1


def test_a_slow_text_server_loses_the_oldest_sentences_and_says_so_once(
    engine, text_server, monkeypatch
):
    monkeypatch.setattr(translation_session, "MOST_WAITING", 2)
    made = []
    original = translation_session.LiveTranslation

    def recorded(*args):
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(translation_session, "LiveTranslation", recorded)
    with connected(engine, BOTH) as wire:
        wire.portal.call(text_server.manager.gate_set, False)
        wire.say(WORDS[:3], 1.0)
        wire.portal.call(reach, lambda: text_server.manager.running)
        for _ in range(4):
            wire.say(WORDS[3:6], 1.0)
        while wire.text(INPUT).count("foxtrot.") < 4:
            wire.until(INPUT)
        wire.say(WORDS[6:9], 1.0)
        while "india." not in wire.text(INPUT):
            wire.until(INPUT, "error")
        assert len(made[0]._jobs) == 3
        wire.portal.call(text_server.manager.gate_set, True)
        wire.close()
        assert wire.text(OUTPUT) == "ALPHA BRAVO CHARLIE. DELTA ECHO FOXTROT. GOLF HOTEL INDIA."
        (error,) = wire.of("error")
        assert error["error"]["code"] == "translation_behind"


def test_a_refused_language_is_told_and_transcription_goes_on(engine, text_server):
    async def refuse(request):
        return httpx.Response(400, json={"error": {"message": "no such thing"}})

    text_server.handle_async_request = refuse
    with connected(engine, BOTH) as wire:
        wire.say(WORDS[:6])
        wire.close()
        assert wire.text(INPUT).endswith("foxtrot.") and wire.text(OUTPUT) == ""
        (error,) = wire.of("error")
        assert "no such thing" in error["error"]["message"]


def test_what_is_spoken_in_the_target_language_is_its_own_translation(engine, text_server):
    with connected(engine, {"audio": {"output": {"language": "English"}}}) as wire:
        wire.say(WORDS[:6])
        wire.close()
        assert wire.text(OUTPUT) == "Alpha bravo charlie. Delta echo foxtrot."
    assert not text_server.manager.requests


def test_without_a_language_nothing_is_translated_until_there_is_one(engine, text_server):
    with connected(engine, {"audio": {"input": {"transcription": {}}}}) as wire:
        wire.say(WORDS[:3], 1.0)
        while "charlie." not in wire.text(INPUT):
            wire.until(INPUT)
        wire.update(FRENCH)
        wire.say(WORDS[3:6])
        wire.close()
        assert wire.text(OUTPUT) == "DELTA ECHO FOXTROT."


def test_the_events_of_transcription_sessions_come_where_they_are_asked_for(engine, text_server):
    with connected(engine, FRENCH, {"sglang_ext": {"transcription_events": True}}) as wire:
        wire.say(WORDS[:3], 1.0)
        done = wire.until(COMPLETED)
        assert wire.of("input_audio_buffer.speech_started")
        assert wire.deltas(done["item_id"]) == done["transcript"] == "Alpha bravo charlie."
        wire.close()
        (tail,) = [t for t in wire.of(OUTPUT_TAIL) if t["final"]]
        assert tail["item_id"] == done["item_id"]


def test_a_client_that_leaves_leaves_nothing_on_the_text_server(engine, text_server):
    with connected(engine, FRENCH, STEP) as wire:
        wire.portal.call(text_server.manager.gate_set, False)
        wire.say(WORDS[:5])
        wire.portal.call(reach, lambda: text_server.manager.running)
        portal = wire.portal
        wire.socket.close()
        portal.call(reach, lambda: not text_server.manager.running)
        portal.call(reach, lambda: not len(text_server.table))
        assert text_server.manager.aborted


def test_the_namespace_of_a_session_is_that_of_its_translations(engine, text_server):
    name = "x-sglang-ext-namespace"
    with connected(engine, FRENCH, headers={name: "tenant"}) as wire:
        wire.say(WORDS[:3])
        wire.close()
    assert text_server.headers == [{name: "tenant"}]
    (request,) = {r.params["namespace"] for r in text_server.manager.requests}
    assert request == "tenant"


BAD = [
    ({"type": "transcription"}, "session.type", "invalid_value"),
    ({"model": "gpt-realtime-translate"}, "session.model", "model_not_found"),
    ({"model": 7}, "session.model", "invalid_value"),
    ({"voice": "x"}, "session", "unknown_parameter"),
    ({"audio": 1}, "session.audio", "invalid_value"),
    ({"audio": {"output": {"language": "xx"}}}, "session.audio.output.language", "invalid_value"),
    ({"audio": {"output": {"language": 7}}}, "session.audio.output.language", "invalid_value"),
    ({"audio": {"output": {"voice": "x"}}}, "session.audio.output", "unknown_parameter"),
    ({"audio": {"input": {"turn_detection": None}}}, "session.audio.input.turn_detection",
     "invalid_value"),
    ({"audio": {"input": {"format": {"type": "opus"}}}}, "session.audio.input.format.type",
     "invalid_value"),
    ({"audio": {"input": {"noise_reduction": {"strength": 2}}}},
     "session.audio.input.noise_reduction.strength", "invalid_value"),
    ({"sglang_ext": {"mask": -1}}, "session.sglang_ext.mask", "invalid_value"),
    ({"sglang_ext": {"finished_only": 1}}, "session.sglang_ext.finished_only", "invalid_value"),
    ({"sglang_ext": {"step": 1}}, "session.sglang_ext", "unknown_parameter"),
]  # fmt: skip


def test_wrong_settings_are_errors_that_name_the_field_and_change_nothing(engine, text_server):
    with connected(engine) as wire:
        for session, param, code in BAD:
            wire.send("session.update", session=session)
            error = wire.until("error", "session.updated")["error"]
            assert (error["param"], error["code"]) == (param, code), (session, error)
        assert wire.update({"type": "translation"}) == wire.session


def test_settings_that_are_left_out_stay_and_null_is_the_default(engine, text_server):
    with connected(engine) as wire:
        near = {"noise_reduction": {"type": "near_field", "strength": 0.5}}
        first = wire.update(
            {"audio": {"input": near, "output": {"language": "German"}}}
            | {"sglang_ext": {"mask": 2, "step_ms": 500, "beta": 0.5}}
        )
        assert first["audio"]["output"] == {"language": "de"}
        assert first["audio"]["input"]["noise_reduction"] is None
        second = wire.update({"sglang_ext": {"finished_only": True, "beta": None}})
        assert second["sglang_ext"] == {
            "step_ms": 500, "live_policy": "localagreement", "alignatt_frames": 20,
            "padding_ms": 7000, "view": None, "finished_only": True,
            "mask": 2, "beta": None, "transcription_events": False,
        }  # fmt: skip
        assert second["audio"]["output"] == {"language": "de"}
        assert wire.update({"audio": {"output": None}})["audio"]["output"] == {"language": None}


def test_events_of_other_sessions_are_unknown_and_nothing_is_taken_while_closing(
    engine, text_server
):
    with connected(engine, FRENCH) as wire:
        for kind in ("input_audio_buffer.append", "input_audio_buffer.commit", "response.create"):
            wire.send(kind)
            error = wire.until("error")["error"]
            assert error["code"] == "unknown_event" and APPEND in error["message"]
        wire.portal.call(engine.gate_set, False)
        wire.say(WORDS[:3])
        wire.send("session.close")
        wire.append(b"\0\0")
        assert "being closed" in wire.until("error")["error"]["message"]
        wire.portal.call(engine.gate_set, True)
        wire.until("session.closed")
        assert wire.text(OUTPUT) == "ALPHA BRAVO CHARLIE."


def test_without_a_text_server_a_client_is_told_why(engine):
    with (
        pytest.raises(AssertionError, match="not_supported"),
        connected(engine, options={"translate_with": ""}),
    ):
        pass


def test_a_multilingual_whisper_without_a_text_server_translates_into_english_itself(
    engine, text_server, monkeypatch
):
    nobody = httpx.AsyncClient(transport=text_server)
    monkeypatch.setattr(realtime_route, "client", lambda *_: nobody)
    engine.vocabulary = WhisperVocabulary(51_865)
    spoken_in = {"audio": {"input": {"transcription": {"language": "de"}}}}
    into = {"audio": {"output": {"language": "en"}}}
    events = {"sglang_ext": {"finished_only": True}}
    with connected(engine, spoken_in, into, events, options={"translate_with": ""}) as wire:
        wire.send("session.update", session=FRENCH)
        error = wire.until("error", "session.updated")["error"]
        assert error["param"] == "session.audio.output.language"
        assert error["code"] == "not_supported" and "--translate-with URL" in error["message"]
        wire.say(WORDS[:6], 1.0)
        wire.close()
        assert [e["delta"] for e in wire.of(OUTPUT)] == [
            "Alpha bravo charlie.", " Delta echo foxtrot.",
        ]  # fmt: skip
        # There is no transcript: English is all that was heard.
        assert not wire.of(INPUT) and not any(t["text"] or t["words"] for t in wire.of(TAIL))
    assert engine.tasks == {"translate"} and not text_server.manager.requests


def test_transcripts_only_grow_whatever_is_shown():
    made = Transcript()
    said = [
        made.shown(0, "Le", False),
        made.shown(0, "Le chat", False),
        made.shown(0, "Un chat dort", False),  # the session was lost: wait for its end
        made.shown(0, "Un chat dort ici.", True),
        made.shown(1, "犬", True),
        made.shown(2, "Oui.", True),
        made.shown(3, "", True),
    ]
    assert said == ["Le", " chat", "", " dort ici.", "犬", " Oui.", ""]


def test_words_of_sentences_have_their_places():
    made = SpokenSentences()
    first = made.update("a", "de", [(" Eins", 1), (" zwei.", 2), (" Drei", 3)], " vier")
    assert [(s.text, s.final, s.ends_ms) for s in first] == [
        ("Eins zwei.", True, (1, 2)), ("Drei", False, (3,)),
    ]  # fmt: skip
    (second,) = made.update("a", None, [(" vier", 4)], "")
    assert (second.text, second.ends_ms, second.language) == ("Drei vier", (3, 4), "de")
    assert [second.end_ms(text) for text in ("", "Drei", "Drei vier", "a b c")] == [0, 3, 4, 4]
    (third,) = made.end_item("a")
    assert third.final and third.ends_ms == (3, 4) and made.get(1) == third
    made.forget(1)
    assert made.get(1) is None
    (fourth,) = made.update("b", None, [(" Fünf", 9)], "")
    assert (fourth.index, fourth.ends_ms, fourth.item_id) == (2, (9,), "b")


@pytest.mark.parametrize(
    ("unstable", "mask", "shown"),
    [
        (" un deux trois quatre", 3, " un"),
        (" un deux trois quatre", 0, " un deux trois quatre"),
        ("un deux", 3, ""),
        ("un deux trois quatre", 1, "un deux trois"),
        ("", 3, ""),
        ("你好吗", 1, "你好"),
    ],
)
def test_the_last_words_that_are_not_settled_are_not_shown(unstable, mask, shown):
    assert shown_tail(unstable, mask) == shown
