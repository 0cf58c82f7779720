"""Viewers of sessions: many of one, sent what is shown now, let go if they do not read."""

import asyncio
import contextlib

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import WebSocketRoute
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from sglang_ext.api.realtime import views
from sglang_ext.api.realtime.realtime_events import (
    OUTPUT_TAIL,
    delta_event,
    event,
    tail_event,
    transcript_event,
)
from sglang_ext.api.realtime.realtime_route import PATH, VIEWS, Realtime
from sglang_ext.api.realtime.views import VIEW, Publisher, View, Views, watch
from tests.unit.api.realtime.fake_whisper import WORDS, FakeWhisper
from tests.unit.api.realtime.test_realtime_route import COMPLETED, Wire, backend

NAME = "a-view-of-16-chars"


def shown(name=NAME):
    return {"type": "transcription", "sglang_ext": {"view": name}}


@contextlib.contextmanager
def serving(**settings):
    made = Realtime(lambda: backend(FakeWhisper(), **settings))
    app = FastAPI()
    app.router.routes += [WebSocketRoute(PATH, made.socket), WebSocketRoute(VIEWS, made.viewer)]
    with TestClient(app) as client:
        yield client, made


def until(viewer, condition):
    """The first view for which it holds."""
    while True:
        told = viewer.receive_json()
        assert told["type"] == VIEW, told
        if condition(told):
            return told


def test_many_viewers_see_what_a_session_shows_and_see_it_end_and_come_back():
    with serving() as (client, made):
        address = f"{VIEWS}?view={NAME}"
        with client.websocket_connect(address) as early:
            first = early.receive_json()
            empty = {"text": "", "chars": 0, "tail": ""}
            assert (first["live"], first["source"], first["translation"]) == (False, empty, empty)
            for words in (WORDS[:3], WORDS[3:6]):
                with client.websocket_connect(PATH) as socket:
                    wire = Wire(socket, client.portal, None)
                    wire.update(shown())
                    wire.say(words, 1.0)
                    wire.until(COMPLETED)
                    last = words[2]
                    told = until(early, lambda t, w=last: w in t["source"]["text"] and t["live"])
                    with client.websocket_connect(address) as late:
                        assert late.receive_json()["source"] == told["source"]
                until(early, lambda t: not t["live"])
            text = " ".join(WORDS[:6])
            assert told["source"] == {"text": text, "chars": len(text), "tail": ""}
        client.portal.call(reach, lambda: not len(made._views))


async def reach(condition):
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never came to pass")


def test_who_does_not_know_the_name_or_the_key_sees_nothing():
    with serving(api_key="secret") as (client, _):
        with (
            pytest.raises(WebSocketDenialResponse),
            client.websocket_connect(f"{VIEWS}?view={NAME}"),
        ):
            pass
        key = ["realtime", "openai-insecure-api-key.secret"]
        for query in ("", "?view=short", "?view=" + "x" * 65, "?view=../../../../../../etc"):
            with client.websocket_connect(VIEWS + query, subprotocols=key) as viewer:
                assert viewer.receive_json()["error"]["param"] == "view"
                with pytest.raises(WebSocketDisconnect) as closed:
                    viewer.receive_json()
                assert closed.value.code == 1008
        with client.websocket_connect(f"{VIEWS}?view={NAME}", subprotocols=key) as viewer:
            assert viewer.accepted_subprotocol == "realtime"
            assert viewer.receive_json()["type"] == VIEW


def test_no_more_viewers_than_streams():
    with serving(options={"max_streams": 1, "namespace_header": ""}) as (client, _):
        address = f"{VIEWS}?view={NAME}"
        with client.websocket_connect(address) as one, client.websocket_connect(address) as other:
            assert one.receive_json()["type"] == VIEW
            assert other.receive_json()["error"]["code"] == "too_many_streams"


def test_a_wrong_name_is_refused_when_a_session_is_set_up():
    with serving() as (client, _), client.websocket_connect(PATH) as socket:
        wire = Wire(socket, client.portal, None)
        for name in ("short", "x" * 20 + " ", "x" * 20 + "\n", "x" * 65):
            wire.send("session.update", session=shown(name))
            error = wire.until("error", "session.updated")["error"]
            assert error["param"] == "session.sglang_ext.view" and "16 to 64" in error["message"]


def test_a_view_follows_both_languages_and_keeps_their_ends():
    view = View()
    view.take(delta_event("a", "One"))
    view.take(transcript_event("input", "One", 1))  # the same once more
    view.take(delta_event("b", "two"))
    view.take(tail_event("b", " three", (), 0.0))
    view.take(transcript_event("output", "Un", 1))
    view.take(event(OUTPUT_TAIL, text=" deux"))
    told = view.event()
    assert told["source"] == {"text": "One two", "chars": 7, "tail": " three"}
    assert told["translation"] == {"text": "Un", "chars": 2, "tail": " deux"}
    for _ in range(200):
        view.take(delta_event("b", " and so on"))
    told = view.event()["source"]
    assert told["chars"] == 2007 and len(told["text"]) == 600
    alone = View()  # of a session that sends no items
    alone.take(transcript_event("input", "One", 1))
    assert alone.event()["source"]["text"] == "One"


def updated(name):
    return event("session.updated", session={"sglang_ext": {"view": name}})


def test_the_last_session_of_a_name_is_the_one_that_is_shown():
    made, sent = Views(), []
    old, new = (Publisher(made, "default", sent.append) for _ in range(2))
    old.send(updated(NAME))
    new.send(updated(NAME))
    old.send(delta_event("a", "old"))
    new.send(delta_event("b", "new"))
    view = made.at("default", NAME)
    assert view.event()["source"]["text"] == "new" and len(sent) == 4
    old.close()
    assert view.event()["live"]
    assert made.at("tenant", NAME) is not view
    made.tidy("tenant", NAME)
    new.send(updated(None))
    assert not view.event()["live"] and len(made) == 0


class Deaf:
    """A socket whose client reads nothing."""

    closed = None

    async def receive(self):
        await asyncio.Event().wait()

    async def send_json(self, _):
        await asyncio.Event().wait()

    async def close(self, code, reason):
        self.closed = code, reason


def test_a_viewer_that_does_not_read_is_let_go_with_a_reason(monkeypatch):
    monkeypatch.setattr(views, "_NOT_READ_S", 0.01)
    socket, view = Deaf(), View()
    asyncio.run(watch(socket, view))
    assert socket.closed == (1008, "the viewer does not read") and not view.used
