"""Realtime sessions over an ASGI WebSocket, with a fake Whisper behind them."""

import asyncio
import base64
import contextlib
import itertools
import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openai.types.beta.realtime import TranscriptionSessionUpdatedEvent
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from starlette.routing import WebSocketRoute
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from sglang_ext.api.realtime import realtime_route
from sglang_ext.api.realtime.realtime_events import TAIL
from sglang_ext.api.realtime.realtime_route import PATH, Realtime, RealtimeBackend
from sglang_ext.options import Options
from speech.chunks import FRAME_S
from speech.prompts import WhisperVocabulary
from tests.unit.api.realtime.fake_whisper import (
    GAP_S,
    WORD_S,
    WORDS,
    FakeWhisper,
    Loudness,
    spoken,
)

COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"
FAILED = "conversation.item.input_audio_transcription.failed"
MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
RATE = 24_000


@pytest.fixture
def engine():
    return FakeWhisper()


def backend(engine, **settings):
    options = Options(**settings.pop("options", {}))
    return RealtimeBackend(engine, options, Loudness, **settings)


def application(made):
    app = FastAPI()
    app.router.routes.append(WebSocketRoute(PATH, Realtime(lambda: made).socket))
    return app


@contextlib.contextmanager
def connected(made, path=PATH, **settings):
    with (
        TestClient(application(made)) as client,
        client.websocket_connect(path, **settings) as socket,
    ):
        first = socket.receive_json()
        assert first["type"].endswith("session.created"), first
        yield Wire(socket, client.portal, first["session"])


class Wire:
    """A client of a session."""

    def __init__(self, socket, portal, session):
        self.socket, self.portal, self.session = socket, portal, session
        self.told = []

    def send(self, kind, **fields):
        self.socket.send_json({"type": kind, **fields})

    def append(self, data):
        self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def say(self, words, silence_s=0.0, rate=RATE):
        """Append speech in pieces of 0.1 s, as PCM."""
        data = pcm(spoken(words, silence_s, rate))
        for first in range(0, len(data), rate // 5):
            self.append(data[first : first + rate // 5])

    def until(self, *kinds):
        """The next event of one of these types; all up to it are in `told`."""
        while True:
            event = self.socket.receive_json()
            self.told.append(event)
            if event["type"] in kinds:
                return event

    def update(self, session, kind="session.update"):
        self.send(kind, session=session)
        event = self.until(f"{kind}d", "error")
        assert event["type"] != "error", event
        return event["session"]

    def deltas(self, item_id):
        return "".join(
            e["delta"] for e in self.told if e["type"] == DELTA and e["item_id"] == item_id
        )


def pcm(samples):
    return (samples * 32767).astype("<i2").tobytes()


def test_a_committed_buffer_is_one_item_whose_deltas_are_its_transcript(engine):
    with connected(backend(engine)) as wire:
        wire.update(MANUAL)
        wire.say(WORDS[:7])
        wire.send("input_audio_buffer.commit")
        done = wire.until(COMPLETED)
        assert done["transcript"] == " ".join(WORDS[:7]) == wire.deltas(done["item_id"])
        assert done["usage"] == {"type": "duration", "seconds": pytest.approx(2.8, abs=0.05)}
        kinds = [e["type"] for e in wire.told if e["type"] not in (TAIL, DELTA)]
        assert kinds == [
            "session.updated",
            "input_audio_buffer.committed",
            "conversation.item.created",
            "conversation.item.added",
            "conversation.item.done",
            COMPLETED,
        ]
        wire.say(WORDS[7:])
        wire.send("input_audio_buffer.commit")
        committed = wire.until("input_audio_buffer.committed")
        assert committed["previous_item_id"] == done["item_id"] != committed["item_id"]
        assert wire.until(COMPLETED)["transcript"] == "hotel india juliett"
    # The first item is what was said before the second one.
    assert "golf" in engine.calls[-1][1] and engine.calls[0][1] == ""


def test_deltas_come_while_speech_goes_on_and_the_tail_follows_them(engine):
    with connected(backend(engine, options={"realtime_step_seconds": 0.4})) as wire:
        wire.update(MANUAL)
        for word in WORDS:
            wire.say([word])
            wire.portal.call(asyncio.sleep, 0.02)
        wire.send("input_audio_buffer.commit")
        done = wire.until(COMPLETED)
        assert done["transcript"] == " ".join(WORDS)
        early = [e for e in wire.told if e["type"] == DELTA][:-1]
        committed = [e["type"] for e in wire.told].index("input_audio_buffer.committed")
        assert len(early) >= 3 and wire.told.index(early[0]) < committed
        tails = [e for e in wire.told if e["type"] == TAIL]
        assert all(e["item_id"] == done["item_id"] and e["lag_s"] >= 0 for e in tails)
        assert any(e["text"] for e in tails) and tails[-1]["text"] == ""
        words = [word for e in tails for word in e["words"]]
        assert "".join(w["word"] for w in words).strip() == done["transcript"]
        ends = [w["end_ms"] for w in words]
        assert ends == sorted(ends) and ends[-1] == pytest.approx(3900, abs=150)


def test_the_vad_makes_items_and_tells_where_speech_begins_and_ends(engine):
    with connected(backend(engine)) as wire:
        assert wire.session["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        wire.say([], silence_s=1.0)
        wire.say(WORDS[:3], silence_s=1.0)
        first = wire.until(COMPLETED)
        wire.say(WORDS[3:6], silence_s=1.0)
        second = wire.until(COMPLETED)
        assert (first["transcript"], second["transcript"]) == (
            "alpha bravo charlie", "delta echo foxtrot",
        )  # fmt: skip
        started = [e for e in wire.told if e["type"] == "input_audio_buffer.speech_started"]
        stopped = [e for e in wire.told if e["type"] == "input_audio_buffer.speech_stopped"]
        assert [e["item_id"] for e in started] == [first["item_id"], second["item_id"]]
        assert [e["item_id"] for e in stopped] == [first["item_id"], second["item_id"]]
        # 0.3 s before speech, 0.5 s of silence behind it.
        assert [e["audio_start_ms"] for e in started] == pytest.approx([700, 2900], abs=70)
        assert [e["audio_end_ms"] for e in stopped] == pytest.approx([2600, 4800], abs=70)
        for item in (first, second):
            assert wire.deltas(item["item_id"]) == item["transcript"]


def test_silence_makes_no_request_and_no_item_and_the_socket_says_it_lives(engine):
    with connected(backend(engine, keep_alive_s=0.01)) as wire:
        wire.say([], silence_s=20.0)
        alive = wire.until(TAIL)
        assert (alive["item_id"], alive["text"], alive["lag_s"]) == (None, "", 0)
        wire.send("input_audio_buffer.commit")
        assert wire.until(COMPLETED, "error")["transcript"] == ""
    assert not engine.calls


@pytest.mark.parametrize(
    ("beta", "ga", "rate"),
    [
        ("pcm16", {"type": "audio/pcm", "rate": 24_000}, 24_000),
        (None, {"type": "audio/pcm", "rate": 16_000}, 16_000),
        (None, {"type": "audio/pcm", "rate": 48_000}, 48_000),
        ("g711_ulaw", {"type": "audio/pcmu"}, 8_000),
        ("g711_alaw", {"type": "audio/pcma"}, 8_000),
    ],
)
def test_audio_in_every_format_is_understood(engine, beta, ga, rate):
    from tests.unit.speech.test_wire_audio import encoded

    updates = [(GA_KIND, {"type": "transcription", "audio": {"input": {"format": ga}}})]
    if beta:
        updates.append((BETA_KIND, {"input_audio_format": beta}))
    for kind, session in updates:
        with connected(backend(engine)) as wire:
            wire.update(session, kind)
            data = encoded(spoken(WORDS[:5], 1.0, rate), ga["type"])
            for first in range(0, len(data), rate // 10):
                wire.append(data[first : first + rate // 10])
            assert wire.until(COMPLETED)["transcript"] == " ".join(WORDS[:5])


LOCAL = {
    "step_ms": 1000, "live_policy": "localagreement", "alignatt_frames": 20, "padding_ms": 7000,
    "view": None,
}  # fmt: skip
GA_KIND, BETA_KIND = "session.update", "transcription_session.update"


def test_both_shapes_of_settings_are_taken_kept_and_shown(engine):
    engine.vocabulary = WhisperVocabulary(51_865)
    headers = {"openai-beta": "realtime=v1"}
    with connected(backend(engine), f"{PATH}?intent=transcription", headers=headers) as wire:
        shown = wire.update(
            {
                "input_audio_format": "g711_ulaw",
                "input_audio_transcription": {"model": "fake", "language": "fr", "prompt": "Ask"},
                "input_audio_noise_reduction": {"type": "near_field"},
                "turn_detection": {"type": "server_vad", "silence_duration_ms": 900.0},
            },
            BETA_KIND,
        )
        assert shown["input_audio_format"] == "g711_ulaw"
        assert shown["input_audio_noise_reduction"] is None
        assert shown["input_audio_transcription"] == {
            "model": "fake", "language": "fr", "prompt": "Ask",
        }  # fmt: skip
        assert shown["turn_detection"] == {
            "type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300,
            "silence_duration_ms": 900,
        }  # fmt: skip
        secret = {"client_secret": {"expires_at": 1, "value": ""}}
        told = json.dumps(wire.told[-1] | {"session": shown | secret})
        TypeAdapter(TranscriptionSessionUpdatedEvent).validate_json(
            told.replace('"fake"', '"whisper-1"')
        )
        # What is left out stays, null is the default.
        language = {"transcription": {"language": None}, "format": None}
        shown = wire.update(
            {"type": "transcription", "audio": {"input": language}, "sglang_ext": {"step_ms": 500}}
        )
        given = shown["audio"]["input"]
        assert given["format"] == {"type": "audio/pcm", "rate": 24_000}
        assert given["transcription"] == {"model": "fake", "language": None, "prompt": "Ask"}
        assert given["turn_detection"]["silence_duration_ms"] == 900
        assert shown["sglang_ext"] == LOCAL | {"step_ms": 500}
        wire.say(WORDS[:2], 1.5)
        wire.until(COMPLETED)
    assert engine.detected == 1 and "Ask" in engine.calls[0][1]


def test_without_a_name_the_policy_is_the_soonest_that_the_server_can(engine):
    for guided, name, step_ms in ((True, "alignatt", 300), (False, "localagreement", 1000)):
        with connected(backend(engine, guided=guided)) as wire:
            now = LOCAL | {"step_ms": step_ms, "live_policy": name}
            assert wire.session["sglang_ext"] == now


def test_a_session_chooses_its_policy_and_keeps_what_it_leaves_out(engine):
    options = {"live_policy": "alignatt", "alignatt_frames": 7}
    with connected(backend(engine, guided=True, options=options)) as wire:
        now = LOCAL | {"step_ms": 300, "live_policy": "alignatt", "alignatt_frames": 7}
        assert wire.session["sglang_ext"] == now
        for given, changed in (
            ({"alignatt_frames": 0}, {"alignatt_frames": 0}),
            # Each policy has a step of its own, until one is named.
            ({"live_policy": "localagreement"}, {"live_policy": "localagreement", "step_ms": 1000}),
            ({"step_ms": 400}, {"step_ms": 400}),
            ({"live_policy": None, "step_ms": None}, {"live_policy": "alignatt", "step_ms": 300}),
            (None, {"alignatt_frames": 7}),
        ):
            now |= changed
            shown = wire.update({"type": "transcription", "sglang_ext": given})
            assert shown["sglang_ext"] == now


def test_words_that_attend_to_what_has_passed_come_from_one_hypothesis(engine):
    """With a step of 0.8 s, two words: LocalAgreement-2 is a step behind."""
    shown = {}
    for policy in ("localagreement", "alignatt"):
        with connected(backend(engine, guided=True)) as wire:
            extra = {"live_policy": policy, "step_ms": 800, "alignatt_frames": 5}
            wire.update(MANUAL | {"sglang_ext": extra})
            for word in WORDS:
                wire.say([word])
                wire.portal.call(asyncio.sleep, 0.02)
            wire.send("input_audio_buffer.commit")
            done = wire.until(COMPLETED)
            assert done["transcript"] == " ".join(WORDS) == wire.deltas(done["item_id"])
            tails = [e for e in wire.told if e["type"] == TAIL]
            shown[policy] = [len(e["words"]) for e in tails][:3]
    assert shown["localagreement"][0] == 0 < shown["alignatt"][0]
    assert {params.get("attended_frames") for params, _ in engine.calls} == {1500}


def test_what_runs_on_is_cut_off(engine):
    """A hypothesis gets so many tokens as the last one had and as can be said since; one that ends
    an item gets all."""
    with connected(backend(engine)) as wire:
        wire.update(MANUAL)
        for word in WORDS:
            wire.say([word])
            wire.portal.call(asyncio.sleep, 0.02)
        wire.send("input_audio_buffer.commit")
        wire.until(COMPLETED)
    seconds, most = zip(*engine.limits, strict=True)
    assert most[0] <= 12 + 15 * seconds[0] + 1
    for limit, (heard, more) in zip(most[1:-1], itertools.pairwise(seconds[:-1]), strict=True):
        assert limit <= len(WORDS) * 3 + 13 + 15 * (more - heard)
    assert most[-1] is None


def test_a_server_that_cannot_read_attention_is_not_asked_to(engine):
    with connected(backend(engine)) as wire:
        wire.update(MANUAL)
        wire.say(WORDS)
        wire.send("input_audio_buffer.commit")
        wire.until(COMPLETED)
    assert not any("attended_frames" in params for params, _ in engine.calls)


def test_a_whisper_that_tells_nothing_still_says_all_at_the_end(engine):
    engine.tells = False
    with connected(backend(engine, guided=True)) as wire:
        wire.update(MANUAL | {"sglang_ext": {"live_policy": "alignatt"}})
        wire.say(WORDS)
        wire.send("input_audio_buffer.commit")
        assert wire.until(COMPLETED)["transcript"] == " ".join(WORDS)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"live_policy": "alignatt"}, "live_policy", "not_supported"),
        ({"live_policy": "best"}, "live_policy", "invalid_value"),
        ({"alignatt_frames": -1}, "alignatt_frames", "invalid_value"),
        ({"alignatt_frames": 1e9}, "alignatt_frames", "invalid_value"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused(engine, given, param, code):
    with connected(backend(engine)) as wire:
        wire.send("session.update", session={"type": "transcription", "sglang_ext": given})
        error = wire.until("error", "session.updated")["error"]
        assert (error["param"], error["code"]) == (f"session.sglang_ext.{param}", code)
        assert wire.update({"type": "transcription"})["sglang_ext"] == LOCAL


BAD_SETTINGS = [
    ({"type": "realtime"}, "session.type", "invalid_value"),
    ({}, "session.type", "invalid_value"),
    ({"type": "transcription", "voice": "x"}, "session", "unknown_parameter"),
    ({"format": {"type": "audio/pcm", "rate": 44_100}}, "format.rate", "invalid_value"),
    ({"format": {"type": "audio/pcmu", "rate": 24_000}}, "format.rate", "invalid_value"),
    ({"format": {"type": "opus"}}, "format.type", "invalid_value"),
    ({"format": "pcm16"}, "format", "invalid_value"),
    ({"turn_detection": {"type": "semantic_vad"}}, "turn_detection.type", "invalid_value"),
    ({"turn_detection": {"type": "server_vad", "threshold": 2}}, "turn_detection.threshold",
     "invalid_value"),
    ({"turn_detection": {"type": "server_vad", "\ud800": 2}}, "turn_detection",
     "unknown_parameter"),
    ({"transcription": {"model": "whisper-1"}}, "transcription.model", "model_not_found"),
    ({"transcription": {"language": "xx"}}, "transcription.language", "invalid_language_format"),
    ({"transcription": {"prompt": "x" * 5000}}, "transcription.prompt", "invalid_value"),
    ({"transcription": {"prompt": "\ud800"}}, "transcription.prompt", "invalid_value"),
    ({"noise_reduction": {"type": "loud"}}, "noise_reduction.type", "invalid_value"),
    ({"noise": 1}, "session.audio.input", "unknown_parameter"),
]  # fmt: skip


def test_wrong_settings_are_errors_that_name_the_field_and_change_nothing(engine):
    with connected(backend(engine)) as wire:
        for given, param, code in BAD_SETTINGS:
            whole = not given or "type" in given
            session = given if whole else {"type": "transcription", "audio": {"input": given}}
            path = param if whole or param.startswith("session") else f"session.audio.input.{param}"
            wire.socket.send_text(
                json.dumps({"type": "session.update", "session": session, "event_id": "e1"})
            )
            error = wire.until("error", "session.updated")["error"]
            assert (error["param"], error["code"]) == (path, code), (given, error)
            assert error["type"] == "invalid_request_error" and error["event_id"] == "e1"
        last = wire.update({"type": "transcription"})
        assert last == wire.session


BAD_EVENTS = [
    ("{", None, "invalid_payload"),
    ("[" * 100_000, None, "invalid_payload"),
    ("[]", None, "invalid_payload"),
    ("{}", "type", "unknown_event"),
    ('{"type": ["x"]}', "type", "unknown_event"),
    ('{"type": "response.create"}', "type", "unknown_event"),
    ('{"type": "session.update"}', "session", None),
    ('{"type": "session.update", "session": 1}', "session", "invalid_value"),
    ('{"type": "input_audio_buffer.append"}', "audio", "invalid_value"),
    ('{"type": "input_audio_buffer.append", "audio": "\\ud800"}', "audio", "invalid_audio"),
    ('{"type": "input_audio_buffer.append", "audio": "AAA"}', "audio", "invalid_audio"),
    ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "audio", "invalid_audio"),
    ('{"type": "input_audio_buffer.commit"}', None, "input_audio_buffer_commit_empty"),
    (b"\0\1", None, "invalid_payload"),
]


def test_garbage_is_answered_and_the_session_goes_on(engine):
    with connected(backend(engine)) as wire:
        for message, param, code in BAD_EVENTS:
            if isinstance(message, bytes):
                wire.socket.send_bytes(message)
            else:
                wire.socket.send_text(message)
            error = wire.until("error")["error"]
            assert (error["param"], error["code"]) == (param, code), (message, error)
        wire.socket.send_text('{"type": "x", "event_id": "\\ud800"}')
        assert wire.until("error")["error"]["event_id"] is None
        wire.say(WORDS[:2], 1.0)
        assert wire.until(COMPLETED)["transcript"] == "alpha bravo"


def test_too_long_a_message_is_told_and_closed_with_a_reason(engine):
    made = backend(engine, options={"websocket_message_kb": 64})
    with connected(made) as wire:
        wire.append(bytes(1 << 20))
        assert wire.until("error")["error"]["code"] == "message_too_big"
        with pytest.raises(WebSocketDisconnect) as closed:
            wire.until(COMPLETED)
    assert closed.value.code == 1009 and "65536" in closed.value.reason


def test_audio_beyond_what_may_wait_is_refused_and_the_rest_transcribed(engine):
    with connected(backend(engine, held_s=3.0)) as wire:
        wire.update(MANUAL)
        wire.portal.call(engine.gate_set, False)
        wire.say(WORDS[:7])
        wire.say(WORDS[7:])
        error = wire.until("error")["error"]
        assert (error["code"], error["param"]) == ("buffer_overflow", "audio")
        assert "3 s may" in error["message"]
        wire.portal.call(engine.gate_set, True)
        wire.send("input_audio_buffer.commit")
        assert wire.until(COMPLETED)["transcript"].startswith(" ".join(WORDS[:7]))
        assert not [e for e in wire.told if e["type"] == TAIL and e["lag_s"] > 3]


def test_clearing_forgets_what_was_said_and_aborts_its_request(engine):
    with connected(backend(engine)) as wire:
        wire.update(MANUAL)
        wire.portal.call(engine.gate_set, False)
        wire.say(WORDS[:5])
        wire.portal.call(reach, lambda: engine.running)
        wire.send("input_audio_buffer.clear")
        wire.until("input_audio_buffer.cleared")
        wire.portal.call(reach, lambda: engine.aborted == 1)
        wire.portal.call(engine.gate_set, True)
        wire.say(WORDS[5:])
        wire.send("input_audio_buffer.commit")
        assert wire.until(COMPLETED)["transcript"] == " ".join(WORDS[5:])


async def reach(condition):
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never came to pass")


def test_a_closed_socket_aborts_what_runs(engine):
    with TestClient(application(backend(engine))) as client:
        with client.websocket_connect(PATH) as socket:
            wire = Wire(socket, client.portal, None)
            client.portal.call(engine.gate_set, False)
            wire.say(WORDS[:5])
            client.portal.call(reach, lambda: engine.running)
        client.portal.call(reach, lambda: engine.aborted == 1)
        assert engine.running == 0


def test_what_cannot_be_transcribed_is_told_of_its_item_and_the_next_one_is_fine(engine):
    with connected(backend(engine)) as wire:
        engine.fault = ValueError("no such drafter")
        wire.say(WORDS[:3], 1.0)
        failed = wire.until(FAILED)
        assert failed["error"]["message"] == "no such drafter"
        engine.fault = None
        wire.say(WORDS[3:5], 1.0)
        assert wire.until(COMPLETED)["transcript"] == "delta echo"


def test_an_error_of_ours_ends_the_session_with_a_reason(engine, monkeypatch, caplog):
    made = backend(engine)
    monkeypatch.setattr(realtime_route, "_decoder", lambda *_: None)
    with connected(made) as wire:
        wire.say(WORDS[:3], 1.0)
        assert wire.until("error")["error"]["code"] == "internal_error"
        with pytest.raises(WebSocketDisconnect) as closed:
            wire.until(COMPLETED)
    assert (closed.value.code, closed.value.reason) == (1011, "the session failed")
    assert "a realtime session failed" in caplog.text


def test_the_key_comes_as_a_header_or_as_the_browsers_subprotocol(engine):
    made = backend(engine, api_key="secret")
    right = "openai-insecure-api-key.secret"
    with TestClient(application(made)) as client:
        for headers, protocols in (
            ({}, None),
            ({"authorization": "Bearer wrong"}, None),
            ({}, ["realtime", "openai-insecure-api-key.wrong"]),
            ({}, ["openai-insecure-api-key."]),
        ):
            with (
                pytest.raises(WebSocketDenialResponse) as denied,
                client.websocket_connect(PATH, headers=headers, subprotocols=protocols),
            ):
                pass
            assert denied.value.status_code == 401
        with client.websocket_connect(PATH, headers={"authorization": "bearer secret"}):
            pass
        offered = ["realtime", right, "openai-beta.realtime-v1"]
        with client.websocket_connect(PATH, subprotocols=offered) as socket:
            assert socket.accepted_subprotocol == "realtime"


def test_sessions_are_bounded_and_a_namespace_has_its_share(engine):
    app = application(backend(engine, sessions=2))
    with TestClient(app) as client, client.websocket_connect(PATH) as first:
        assert first.receive_json()["type"] == "session.created"
        with client.websocket_connect(PATH) as second:
            assert second.receive_json()["error"]["code"] == "too_many_streams"
            with pytest.raises(WebSocketDisconnect) as closed:
                second.receive_json()
            assert closed.value.code == 1013
        other = {"x-sglang-ext-namespace": "acme"}
        with client.websocket_connect(PATH, headers=other) as third:
            assert third.receive_json()["type"] == "session.created"
            wire = Wire(third, client.portal, None)
            wire.say(WORDS[:2], 1.0)
            wire.until(COMPLETED)
    assert engine.calls[-1][0]["namespace"] == "acme"


def test_a_model_that_is_not_served_and_a_bad_namespace_are_told(engine):
    with TestClient(application(backend(engine))) as client:
        for path, headers in (
            (f"{PATH}?model=gpt-9", {}),
            (PATH, {"x-sglang-ext-namespace": "a b"}),
        ):
            with client.websocket_connect(path, headers=headers) as socket:
                assert socket.receive_json()["error"]["type"] == "invalid_request_error"
                with pytest.raises(WebSocketDisconnect) as closed:
                    socket.receive_json()
                assert closed.value.code == 1008 and closed.value.reason


def test_what_will_be_heard_again_is_not_remembered(engine):
    with connected(backend(engine)) as wire:
        wire.say(WORDS[:6])
        wire.portal.call(reach, lambda: engine.calls)
        wire.send("input_audio_buffer.clear")
        wire.say([WORDS[6]])
        wire.send("input_audio_buffer.commit")
        wire.until(COMPLETED)
    assert engine.calls[0][0]["ingest"] is False and engine.calls[-1][0] == {}


def test_of_what_will_be_heard_again_a_part_of_the_window_is_encoded(engine):
    with connected(backend(engine, options={"live_padding_seconds": 2.0})) as wire:
        for padding in (None, 4000, 30_000):
            wire.update(MANUAL | {"sglang_ext": {"padding_ms": padding}})
            calls = len(engine.calls)
            wire.say(WORDS[:6])
            wire.portal.call(reach, lambda before=calls: len(engine.calls) > before)
            wire.send("input_audio_buffer.commit")
            wire.until(COMPLETED)
            seconds = 6 * (WORD_S + GAP_S) + (padding or 2000) / 1000
            frames = min(1500, seconds / FRAME_S)
            # Audio that is there by then, without the silence around it.
            assert frames - 3 / FRAME_S < engine.calls[calls][0]["audio_ctx"] <= frames
            assert "audio_ctx" not in engine.calls[-1][0]


def test_every_event_but_our_own_is_openais(engine):
    known = TypeAdapter(RealtimeServerEvent)
    with connected(backend(engine)) as wire:
        wire.update({"type": "transcription"})
        wire.say(WORDS[:6], 1.0)
        wire.until(COMPLETED)
        wire.send("input_audio_buffer.clear")
        wire.send("nonsense")
        wire.until("error")
        kinds = {e["type"] for e in wire.told}
        assert len(kinds) == 12
        for event in wire.told:
            if event["type"] != TAIL:
                known.validate_json(json.dumps(event).replace('"fake"', '"whisper-1"'))


def test_a_client_that_never_reads_is_let_go():
    """With a socket that takes nothing."""
    from sglang_ext.api.realtime.realtime_socket import RealtimeSocket

    async def run():
        closed = []
        never = asyncio.Event()

        async def stuck(*_):
            await never.wait()

        async def close(code, reason):
            closed.append((code, reason))

        socket = SimpleNamespace(send_json=stuck, receive=stuck, close=close)
        session = SimpleNamespace(run=stuck, abandon=set)
        running = RealtimeSocket(socket, lambda send, broken: session, 1 << 20)
        task = asyncio.create_task(running.run())
        await asyncio.sleep(0)
        for _ in range(600):
            running.send({"type": TAIL})
        assert not task.done() and running._unsent.qsize() < 100
        for _ in range(600):
            running.send({"type": DELTA})
        await asyncio.wait_for(task, 5)
        assert closed == [(1008, "the client does not read: 512 events wait for it")]

    asyncio.run(run())
