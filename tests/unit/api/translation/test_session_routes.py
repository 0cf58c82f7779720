"""The routes of translation sessions, with a fake model behind them."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from sglang_ext.admission.cache_salts import salt_namespace
from sglang_ext.api.translation import session_routes
from sglang_ext.api.translation.session_routes import Backend, add_routes
from sglang_ext.api.translation.session_table import SessionTable
from sglang_ext.api.translation.translator import Translator
from sglang_ext.options import Options
from tests.unit.api.asgi import Call

PATH = "/v1/translation/sessions"
LANGUAGES = {"source_language": "en", "target_language": "fr"}


@pytest.fixture
def server(manager):
    """An application, its session table, and its fake model."""
    options = Options(translation_max_source_chars=100, translation_sessions=3)
    table = SessionTable(3, 60, lambda: manager.gracefully_exit)
    backend = Backend(Translator(manager), table, options)
    return SimpleNamespace(app=made(backend), table=table, manager=manager, backend=backend)


def made(backend):
    app = FastAPI()
    add_routes(app, lambda: backend)
    return app


@pytest.fixture
def client(server):
    with TestClient(server.app) as client:
        yield client


def opened(client, **settings):
    response = client.post(PATH, json=LANGUAGES | settings)
    assert response.status_code == 200, response.text
    return response.json()


async def reach(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never came to pass")


async def open_session(server, **settings):
    _, session = await Call(server.app, "POST", PATH, LANGUAGES | settings).answer()
    return f"{PATH}/{session['id']}"


def test_a_session_from_opening_to_deletion(client):
    session = opened(client, mask=2, metadata={"talk": "7"})
    assert session["id"].startswith("trs-") and session["object"] == "translation.session"
    assert session["expires_at"] - session["created"] in (59, 60)
    assert (session["status"], session["revision"], session["source"]) == ("open", 0, "")
    assert (session["source_language"], session["mask"], session["beta"]) == ("English", 2, None)
    path = f"{PATH}/{session['id']}"
    update = client.post(f"{path}/updates", json={"append": "hello"}).json()
    usage = update.pop("usage")
    assert update == {
        "object": "translation.update", "session": session["id"], "revision": 1, "stable": "",
        "unstable": "HELLO", "text": "HELLO", "final": False, "finish_reason": "stop",
    }  # fmt: skip
    assert usage["completion_tokens"] == 6 and usage["accepted_draft_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    update = client.post(f"{path}/updates", json={"keep": 4, "append": " no"}).json()
    assert update["text"] == "HELL NO" and update["usage"]["accepted_draft_tokens"] == 5
    shown = client.get(path).json()
    assert (shown["source"], shown["stable"], shown["unstable"]) == ("hell no", "HELL ", "NO")
    finished = client.post(f"{path}/finish").json()
    assert (finished["stable"], finished["final"], finished["revision"]) == ("HELL NO", True, 3)
    assert client.get(path).json()["status"] == "finished"
    response = client.post(f"{path}/updates", json={"append": "!"})
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "session_finished"
    assert client.delete(path).json() == {
        "id": session["id"], "object": "translation.session", "deleted": True,
    }  # fmt: skip
    assert client.get(path).status_code == client.delete(path).status_code == 404


def test_wrong_requests_are_refused_and_others_unharmed(client, server):
    path = f"{PATH}/{opened(client)['id']}"
    client.post(f"{path}/updates", json={"append": "ok"})
    for method, url, body, status, param in (
        ("POST", PATH, LANGUAGES | {"beta": 1.5}, 400, "beta"),
        ("POST", PATH, {"source_language": "en"}, 400, "target_language"),
        ("POST", PATH, LANGUAGES | {"model": "other"}, 404, "model"),
        ("GET", f"{PATH}/trs-0", None, 404, None),
        ("POST", f"{PATH}/trs-0/updates", {"append": "a"}, 404, None),
        ("POST", f"{PATH}/trs-0/finish", None, 404, None),
        ("GET", f"{PATH}/trs-0/events", None, 404, None),
        ("GET", f"{path}/ws", None, 426, None),
        ("POST", f"{path}/updates", {}, 400, "append"),
        ("POST", f"{path}/updates", {"append": "x" * 99}, 413, "append"),
        ("POST", f"{path}/updates", {"keep": 3, "append": ""}, 400, "keep"),
        ("POST", f"{path}/updates", {"source": "x" * 1_000_000}, 413, None),
    ):
        response = client.request(method, url, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), (url, error)
        assert set(error) == {"message", "type", "param", "code"}
    response = client.post(f"{path}/updates", content=b'{"append": ')
    assert response.status_code == 400 and "not JSON" in response.json()["error"]["message"]
    update = client.post(f"{path}/updates", json={"append": "!"}).json()
    assert (update["text"], update["revision"]) == ("OK!", 2)


def test_a_source_shrunk_to_nothing_is_an_empty_translation(client, server):
    path = f"{PATH}/{opened(client)['id']}/updates"
    client.post(path, json={"append": "ok"})
    update = client.post(path, json={"source": " "}).json()
    assert (update["text"], update["revision"]) == ("", 2) and len(server.manager.requests) == 1


def test_salts_name_a_sessions_namespace_and_are_not_shown(client, server):
    session = opened(client, cache_salt="pepper", extra_key="key")
    assert not session.keys() & {"cache_salt", "extra_key"}
    path = f"{PATH}/{session['id']}"
    assert client.post(f"{path}/updates", json={"append": "a"}).status_code == 200
    (request,) = server.manager.requests
    assert (request.cache_salt, request.extra_key) == ("pepper", "key")
    assert request.params["namespace"] == salt_namespace("key", "pepper", "")
    server.table.forget(salt_namespace("key", "pepper", ""))
    assert client.get(path).status_code == 404


def test_salts_and_a_header_contradict_each_other(client):
    mine = {"x-sglang-ext-namespace": "acme"}
    refused = client.post(PATH, json=LANGUAGES | {"cache_salt": "pepper"}, headers=mine)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"
    same = {"x-sglang-ext-namespace": salt_namespace(None, "pepper", "")}
    session = client.post(PATH, json=LANGUAGES | {"cache_salt": "pepper"}, headers=same).json()
    assert client.get(f"{PATH}/{session['id']}").status_code == 404
    assert client.get(f"{PATH}/{session['id']}", headers=same).status_code == 200


def test_salts_name_nothing_where_the_server_says_so(server):
    options = Options(salt_namespaces=False, translation_sessions=3)
    server.app = made(Backend(server.backend.translator, server.table, options))
    with TestClient(server.app) as client:
        opened(client, cache_salt="pepper")
    (session,) = server.table._sessions.values()
    assert session.namespace == "default"


def test_limits_and_namespaces(client, server):
    mine = {"x-sglang-ext-namespace": "acme"}
    session = client.post(PATH, json=LANGUAGES, headers=mine).json()
    path = f"{PATH}/{session['id']}"
    assert client.get(path, headers=mine).status_code == 200
    other = {"x-sglang-ext-namespace": "other"}
    for headers in ({}, other):
        for method, end in (("GET", ""), ("GET", "/events"), ("POST", "/finish"), ("DELETE", "")):
            assert client.request(method, path + end, headers=headers).status_code == 404
        response = client.post(f"{path}/updates", json={"append": "a"}, headers=headers)
        assert response.status_code == 404
    client.post(f"{path}/updates", json={"append": "a"}, headers=mine)
    assert [r.params["namespace"] for r in server.manager.requests] == ["acme"]
    assert client.get(path, headers={"x-sglang-ext-namespace": "a b"}).status_code == 400
    twice = [("x-sglang-ext-namespace", "acme"), ("x-sglang-ext-namespace", "b")]
    assert client.get(path, headers=twice).status_code == 400
    opened(client)
    opened(client)
    response = client.post(PATH, json=LANGUAGES)
    assert response.status_code == 429 and response.json()["error"]["code"] == "too_many_sessions"


def test_servers_that_cannot_keep_sessions_say_so(server, manager):
    for change, message in (({"workers": 2}, "one HTTP process"), ({"translator": None}, "token")):
        backend = Backend(**(vars(server.backend) | change))
        response = TestClient(made(backend)).post(PATH, json=LANGUAGES)
        assert response.status_code == 501 and message in response.json()["error"]["message"]


def test_a_failed_generation_is_told_and_leaves_no_trace(client, server):
    path = f"{PATH}/{opened(client)['id']}"
    client.post(f"{path}/updates", json={"append": "a"})
    server.manager.fault = {"type": "abort", "message": "shed", "status_code": 503}
    for stream in (False, True):
        response = client.post(f"{path}/updates", json={"append": "b", "stream": stream})
        assert response.status_code == 503, response.text
        message = response.json()["error"]["message"]
        assert message == "shed; the session is as it was, at revision 1"
    server.manager.fault = None
    assert client.get(path).json()["source"] == "a"


def test_a_streamed_update(server):
    async def run():
        path = await open_session(server, mask=1)
        call = Call(server.app, "POST", f"{path}/updates", {"append": "hello", "stream": True})
        assert await call.begin() == 200
        events = []
        while (event := await call.event()) is not None:
            events.append(event["data"])
        *deltas, update, done = events
        assert done == "[DONE]" and deltas
        assert all(d["object"] == "translation.delta" and d["revision"] == 1 for d in deltas)
        assert all("HELLO".startswith(d["text"]) for d in deltas)
        assert (update["stable"], update["unstable"], update["revision"]) == ("", "HELLO", 1)

    server.manager.pause = 0.005
    asyncio.run(run())


def test_an_error_after_the_first_text_is_the_last_event(server):
    async def run():
        path = await open_session(server)
        call = Call(server.app, "POST", f"{path}/updates", {"append": "hello", "stream": True})
        assert await call.begin() == 200
        server.manager.gate.clear()
        server.manager.fault = ValueError("broken")
        server.manager.gate.set()
        events = []
        while (event := await call.event()) is not None:
            events.append(event["data"])
        assert "broken; the session is as it was" in events[-1]["error"]["message"]

    server.manager.piece, server.manager.pause = 1, 0.005
    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_update_only(server, stream):
    async def run():
        manager = server.manager
        path = await open_session(server)
        await Call(server.app, "POST", f"{path}/updates", {"append": "a"}).answer()
        manager.gate.clear()
        body = {"append": "gone", "stream": stream}
        leaving = Call(server.app, "POST", f"{path}/updates", body)
        staying = Call(server.app, "POST", f"{path}/updates", {"append": "b"})
        await reach(lambda: manager.running)
        leaving.leave()
        await reach(lambda: manager.aborted)
        manager.gate.set()
        _, update = await staying.answer()
        assert (update["text"], update["revision"]) == ("AB", 2)
        await asyncio.wait_for(leaving.task, 5)

    asyncio.run(run())


def test_a_client_that_leaves_a_stream_midway(server):
    async def run():
        manager = server.manager
        manager.piece, manager.pause = 1, 0.005
        path = await open_session(server)
        call = Call(server.app, "POST", f"{path}/updates", {"append": "hello", "stream": True})
        await call.begin()
        await call.event()
        manager.gate.clear()
        call.leave()
        await asyncio.wait_for(call.task, 5)
        await reach(lambda: not manager.running)
        manager.gate.set()
        _, session = await Call(server.app, "GET", path).answer()
        assert (session["source"], session["revision"]) == ("", 0) and manager.aborted

    asyncio.run(run())


def test_deleting_ends_an_update_and_the_events(server):
    async def run():
        path = await open_session(server)
        events = Call(server.app, "GET", f"{path}/events")
        assert await events.begin() == 200
        server.manager.gate.clear()
        update = Call(server.app, "POST", f"{path}/updates", {"append": "a"})
        await reach(lambda: server.manager.running)
        assert (await Call(server.app, "DELETE", path).answer())[0] == 200
        status, body = await update.answer()
        assert status == 404 and body["error"]["code"] == "session_not_found"
        assert (await events.event())["data"] == "[DONE]"
        await asyncio.wait_for(events.task, 5)
        assert server.manager.running == 0 and len(server.table) == 0

    asyncio.run(run())


def test_events_go_on_after_a_reconnect(server, monkeypatch):
    async def run():
        path = await open_session(server)
        events = Call(server.app, "GET", f"{path}/events")
        await events.begin()
        for text in ("a", "b"):
            await Call(server.app, "POST", f"{path}/updates", {"append": text}).answer()
        first, second = await events.event(), await events.event()
        assert (first["id"], first["data"]["text"], second["id"]) == ("1", "A", "2")
        events.leave()
        await asyncio.wait_for(events.task, 5)
        await Call(server.app, "POST", f"{path}/updates", {"append": "c"}).answer()
        again = Call(server.app, "GET", f"{path}/events", headers={"last-event-id": "2"})
        await again.begin()
        assert (await again.event())["data"]["text"] == "ABC"
        await Call(server.app, "POST", f"{path}/finish").answer()
        last = await again.event()
        assert last["id"] == "4" and last["data"]["final"]
        assert (await again.event())["data"] == "[DONE]" and await again.event() is None
        for seen, status in (("3", 200), ("4", 204), ("x", 200)):
            call = Call(server.app, "GET", f"{path}/events", headers={"last-event-id": seen})
            assert await call.begin() == status
            if status == 200:
                assert (await call.event())["id"] == "4"
        monkeypatch.setattr(session_routes, "_KEEP_ALIVE_S", 0.01)
        silent = Call(server.app, "GET", f"{await open_session(server)}/events")
        await silent.begin()
        assert "" in await silent.event()  # a comment: nothing to say yet
        silent.leave()
        await asyncio.wait_for(silent.task, 5)

    asyncio.run(run())


def test_a_websocket_translates_and_survives_errors(client, server):
    server.manager.pause = 0.005
    session = opened(client, mask=1)
    path = f"{PATH}/{session['id']}"
    with client.websocket_connect(f"{path}/ws") as socket:
        messages = ['{"append": "hello"}', '{"append": 1}', "x", '{"beta": 1}', "x" * 1_000_000]
        for message in [*messages, '{"append": " you"}', '{"finish": false}']:
            socket.send_text(message)
        deltas, update = until_update(socket)
        assert deltas and all("HELLO".startswith(d["text"]) for d in deltas)
        assert (update["stable"], update["unstable"], update["revision"]) == ("", "HELLO", 1)
        errors = [socket.receive_json()["error"] for _ in messages[1:]]
        assert [e["param"] for e in errors] == ["append", None, "beta", None]
        assert errors[-1]["code"] == "body_too_large"
        assert until_update(socket)[1]["text"] == "HELLO YOU"
        assert socket.receive_json()["error"]["param"] == "finish"
    assert client.get(path).json()["revision"] == 2
    with client.websocket_connect(f"{path}/ws") as socket:
        socket.send_bytes(b'{"append": "!"}')
        assert until_update(socket)[1]["revision"] == 3
        socket.send_json({"finish": True})
        assert until_update(socket)[1]["stable"] == "HELLO YOU!"
        socket.send_json({"append": "?"})
        assert socket.receive_json()["error"]["code"] == "session_finished"


def until_update(socket):
    """The deltas before the next update, and it."""
    deltas = []
    while (message := socket.receive_json())["object"] == "translation.delta":
        deltas.append(message)
    assert message["object"] == "translation.update"
    return deltas, message


def test_a_websocket_that_closes_aborts_what_runs(client, server):
    session = opened(client)
    with client.websocket_connect(f"{PATH}/{session['id']}/ws") as socket:
        client.portal.call(server.manager.gate_set, False)
        socket.send_json({"append": "a"})
        client.portal.call(reach, lambda: server.manager.running)
    client.portal.call(reach, lambda: server.manager.aborted)
    client.portal.call(server.manager.gate_set, True)
    shown = client.get(f"{PATH}/{session['id']}").json()
    assert (shown["status"], shown["revision"]) == ("open", 0)


def test_a_websocket_ends_with_its_session(client, server):
    path = f"{PATH}/{opened(client)['id']}"
    with client.websocket_connect(f"{path}/ws") as socket:
        client.portal.call(server.manager.gate_set, False)
        socket.send_json({"append": "a"})
        client.portal.call(reach, lambda: server.manager.running)
        assert client.delete(path).status_code == 200
        assert socket.receive_json()["error"]["code"] == "session_not_found"
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
        assert closed.value.code == 4404
    assert server.manager.running == 0


def test_a_websocket_needs_a_session_its_namespace_and_the_key(server):
    backend = Backend(**(vars(server.backend) | {"api_key": "sécret"}))
    key = {"authorization": b"Bearer s\xc3\xa9cret"}
    with TestClient(made(backend)) as client:
        path = f"{PATH}/{opened(client)['id']}/ws"
        for url, headers, status in (
            (path, {}, 401),
            (path, {"authorization": "Bearer wrong"}, 401),
            (path, {"authorization": "Basic secret"}, 401),
            (path, {"authorization": "Bearer "}, 401),
            (f"{PATH}/trs-0/ws", {}, 401),
            (f"{PATH}/trs-0/ws", key, 404),
            (path, key | {"x-sglang-ext-namespace": "acme"}, 404),
            (path, key | {"x-sglang-ext-namespace": "a b"}, 400),
        ):
            with (
                pytest.raises(WebSocketDenialResponse) as denied,
                client.websocket_connect(url, headers=headers),
            ):
                pass
            assert denied.value.status_code == status, (url, headers)
            assert denied.value.json()["error"]["message"]
        with client.websocket_connect(path, headers=key) as socket:
            socket.send_json({"append": "a"})
            assert until_update(socket)[1]["text"] == "A"
