"""The soak's clients against a small server of sessions, right and wrong ones."""

import asyncio
import json
import random
import time
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from scripts.lib import soak_client
from scripts.lib.soak_client import Markers, Soak, Tally
from scripts.soak_sessions import check_empty, run_clients

IDLE_S = 0.6
LIMIT = 40
CLIENTS = 10


def test_markers_differ_in_three_digits():
    markers = Markers(random.Random(1))
    made = [markers.new() for _ in range(200)]
    pairs = [(a, b) for i, a in enumerate(made) for b in made[:i]]
    assert all(sum(x != y for x, y in zip(a, b, strict=True)) >= 3 for a, b in pairs)


def test_markers_are_found_however_they_are_written():
    markers = Markers(random.Random(1))
    first, second = markers.new(), markers.new()
    grouped = f"{second[:3]}\u202f{second[3:]}"
    assert markers.found(f"Le n° {first}, et {grouped}.") == {first, second}
    assert markers.found(f"{first}5 {first[:5]} {first[:3]}-{first[3:]}") == set()
    assert markers.found(f'"trs-c{first}" "trs-{first}ab"') == set()  # a session's name


class Refused(Exception):
    def __init__(self, status: int, param: str | None = None):
        self.status, self.param = status, param


class FakeSessions:
    """The API of translation sessions; a translation is the source in capitals.

    Args:
        fault: what it does wrong.
    """

    def __init__(self, fault: str = ""):
        self.fault = fault
        self.sessions: dict[str, dict[str, Any]] = {}
        self.opened = 0
        self.last_text = ""

    def application(self) -> web.Application:
        @web.middleware
        async def refusals(request: web.Request, handler: Any) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refused as error:
                status = 500 if self.fault == "status" else error.status
                body = {"error": {"message": "no", "param": error.param}}
                return web.json_response(body, status=status)

        app = web.Application(middlewares=[refusals], client_max_size=1 << 24)
        one = soak_client.PATH + "/{id}"
        app.router.add_post(soak_client.PATH, self.open)
        app.router.add_get(one, self.show)
        app.router.add_delete(one, self.delete)
        app.router.add_post(one + "/updates", self.update)
        app.router.add_post(one + "/finish", self.finish)
        app.router.add_get(one + "/events", self.events)
        app.router.add_get(one + "/ws", self.socket)
        app.router.add_post("/flush_cache", self.flush)
        return app

    # -- what the API does --------------------------------------------------------------------

    def expire(self) -> None:
        now = time.monotonic()
        for name, session in list(self.sessions.items()):
            if now - session["used"] > IDLE_S and self.fault != "immortal":
                self.forget(name)

    def forget(self, name: str) -> None:
        if self.fault != "endless events":
            self.tell(self.sessions[name], None)
        del self.sessions[name]

    def find(self, request: web.Request) -> dict[str, Any]:
        self.expire()
        session = self.sessions.get(request.match_info["id"])
        namespace = request.headers.get(soak_client.NAMESPACE_HEADER)
        if session is None or (session["namespace"] != namespace and self.fault != "namespace"):
            raise Refused(404)
        session["used"] = time.monotonic()
        return session

    async def body(self, request: web.Request) -> dict[str, Any]:
        try:
            return json.loads(await request.read() or b"{}")
        except ValueError:
            raise Refused(400) from None

    def change(self, session: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        append, source, keep = body.get("append"), body.get("source"), body.get("keep")
        if session["status"] == "finished":
            raise Refused(409)
        if append is not None and not isinstance(append, str):
            raise Refused(400, "append")
        if (append is None) == (source is None):
            raise Refused(400)
        if keep is not None and keep > len(session["source"]):
            raise Refused(400, "keep")
        changed = source if source is not None else session["source"][:keep] + append
        if len(changed) > 20_000:
            raise Refused(413)
        session["source"] = "" if self.fault == "forgets" else changed
        text = changed.strip().upper()
        if self.fault == "another's draft" and text:
            text, self.last_text = text + self.last_text, text
        return self.commit(session, text, bool(body.get("final")))

    def commit(self, session: dict[str, Any], text: str, final: bool) -> dict[str, Any]:
        cut = len(text) if final else max(0, len(text) - session["mask"])
        session.update(stable=text[:cut], unstable=text[cut:], text=text)
        session["revision"] += self.fault != "revision"
        update = {
            "object": "translation.update", "session": session["id"], "text": text,
            "revision": session["revision"], "stable": text[:cut], "unstable": text[cut:],
        }  # fmt: skip
        self.tell(session, update)
        return update

    def tell(self, session: dict[str, Any], message: Any) -> None:
        for queue in session["listeners"]:
            queue.put_nowait(message)

    def end(self, session: dict[str, Any]) -> dict[str, Any]:
        update = self.commit(session, session["text"], final=self.fault != "holds back")
        session["status"] = "finished"
        if self.fault != "endless events":
            self.tell(session, None)
        return update

    # -- routes -------------------------------------------------------------------------------

    async def open(self, request: web.Request) -> web.Response:
        body = await self.body(request)
        self.expire()
        beta = body.get("beta") or 0
        if isinstance(beta, str) or not 0 <= beta <= 1:
            raise Refused(400, "beta")
        if body.get("mask", 0) < 0:
            raise Refused(400, "mask")
        if "target_language" not in body:
            raise Refused(400, "target_language")
        waiting = [s for s in self.sessions.values() if s["status"] == "open"]
        if len(waiting) >= LIMIT:
            raise Refused(429)
        self.opened += 1
        session = {
            **body, "id": f"trs-{self.opened}", "status": "open", "revision": 0, "source": "",
            "text": "", "mask": body.get("mask", 0), "used": time.monotonic(), "listeners": [],
            "namespace": request.headers.get(soak_client.NAMESPACE_HEADER),
        }  # fmt: skip
        self.sessions[session["id"]] = session
        return web.json_response(self.shown(session))

    @staticmethod
    def shown(session: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in session.items() if k not in ("used", "listeners")}

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response(self.shown(self.find(request)))

    async def delete(self, request: web.Request) -> web.Response:
        session = self.find(request)
        if self.fault != "keeps":
            self.forget(session["id"])
        return web.json_response({"deleted": True})

    async def update(self, request: web.Request) -> web.StreamResponse:
        body = await self.body(request)
        session = self.find(request)
        await asyncio.sleep(0.005)
        if not body.get("stream"):
            return web.json_response(self.change(session, body))
        if self.fault == "stream":
            return await self.stream(request, [{"error": {"message": "broken"}}])
        delta = {"object": "translation.delta", "text": "x"}
        return await self.stream(request, [delta, self.change(session, body)])

    async def stream(self, request: web.Request, messages: list[Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for message in messages:
            await response.write(f"data: {json.dumps(message)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def finish(self, request: web.Request) -> web.Response:
        return web.json_response(self.end(self.find(request)))

    async def events(self, request: web.Request) -> web.StreamResponse:
        session, queue = self.find(request), asyncio.Queue[Any]()
        session["listeners"].append(queue)
        response = web.StreamResponse()
        await response.prepare(request)
        while (message := await queue.get()) is not None:
            await response.write(f"id: 1\ndata: {json.dumps(message)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        session, socket = self.find(request), web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            body = json.loads(message.data)
            if self.fault == "socket":
                await socket.send_json({"error": {"message": "broken"}})
            await socket.send_json({"object": "translation.delta", "text": "x"})
            self.find(request)
            try:
                answer = self.end(session) if "finish" in body else self.change(session, body)
            except Refused as error:
                answer = {"error": {"message": "no", "param": error.param}}
            with suppress(ConnectionError):
                await socket.send_json(answer)
        return socket

    async def flush(self, request: web.Request) -> web.Response:
        return web.Response(status=400 if self.fault == "runs on" else 200)


def soak(fault: str = "", seconds: float = 0.3, emptied: bool = False) -> Tally:
    """The tally of a short soak of a server with a fault; `emptied`: what is left is checked."""

    async def run() -> Tally:
        server = FakeSessions(fault)
        runner = web.AppRunner(server.application(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as http:
            url, rng = f"http://127.0.0.1:{port}", random.Random(1)
            shared = Soak(url, http, rng, idle_s=IDLE_S, margin_s=0.2, pause_s=0.03)
            for _ in range(10):  # what a client does is drawn by lot
                await run_clients(shared, CLIENTS, seconds)
                if shared.tally.problems or not fault or fault == "runs on":
                    break
            if emptied:
                await check_empty(shared, LIMIT)
        await runner.cleanup()
        return shared.tally

    return asyncio.run(run())


def test_a_server_that_is_right_has_no_problem():
    tally = soak(seconds=1.0, emptied=True)
    assert tally.problems == []
    for kind in ("sessions", "updates", "disconnects", "refusals", "events", "expiries"):
        assert tally.counts[kind] > 0, kind
    assert tally.counts["with_own_number"] == tally.counts["texts"] > 0


@pytest.mark.parametrize("fault", ["another's draft", "forgets"])
def test_cross_talk_is_found(fault):
    assert soak(fault).counts["cross_talk"] > 0


@pytest.mark.parametrize(
    "fault, problem",
    [
        ("status", "must be refused with"),
        ("namespace", "must be refused with 404"),
        ("keeps", "must be refused with 404"),
        ("immortal", "sessions expected to open, then 429"),
        ("endless events", "go on after the session's end"),
        ("revision", "an update after revision"),
        ("holds back", "an update after revision"),
        ("stream", "a streamed update ended with"),
        ("socket", "the WebSocket answered"),
        ("runs on", "requests run without a client"),
    ],
)
def test_faults_are_unprovoked_errors(fault, problem):
    tally = soak(fault, emptied=fault in ("immortal", "runs on"))
    assert tally.counts["unprovoked_errors"] > 0
    assert tally.counts["cross_talk"] == 0
    assert any(problem in text for text in tally.problems), tally.problems
    if fault == "immortal":
        assert any("a session that was let go" in text for text in tally.problems)
