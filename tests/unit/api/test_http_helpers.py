"""What the HTTP services share: clients that leave, bodies within a limit, errors and events."""

import asyncio
import json

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from sglang_ext.api.http import (
    ApiError,
    answering,
    checked_meta,
    event,
    read_body,
    refusal,
    while_connected,
)
from tests.unit.api.asgi import Call


def request_of(*messages):
    """A request whose client sends these, and then nothing."""
    waiting = list(messages)

    async def receive():
        if waiting:
            return waiting.pop(0)
        await asyncio.Event().wait()

    return Request({"type": "http", "headers": []}, receive)


def part(body, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


class Work:
    """Work that never ends by itself, and takes a moment to clean up."""

    began = ended = False

    async def run(self):
        self.began = True
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.ended = True


def test_work_of_a_client_that_leaves_has_ended_before_the_route_does():
    work = Work()
    ended_first = []
    app = FastAPI()

    async def route(request: Request):
        await request.body()
        try:
            return await while_connected(request, work.run())
        finally:
            ended_first.append(work.ended)

    app.add_api_route("/", answering(route, lambda e: refusal(e, "x")), methods=["POST"])

    async def run():
        call = Call(app, "POST", "/", {})
        while not work.began:
            await asyncio.sleep(0)
        call.leave()
        assert (await call.answer())[0] == 499
        assert ended_first == [True]

    asyncio.run(asyncio.wait_for(run(), 5))


def test_a_client_that_stays_gets_the_result_or_the_error():
    async def give():
        return 5

    async def fail():
        raise ValueError("broken")

    assert asyncio.run(while_connected(request_of(part(b"")), give())) == 5
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(while_connected(request_of(), fail()))


def test_a_route_that_is_cancelled_cancels_its_work():
    work = Work()

    async def run():
        route = asyncio.create_task(while_connected(request_of(), work.run()))
        while not work.began:
            await asyncio.sleep(0)
        route.cancel()
        with pytest.raises(asyncio.CancelledError):
            await route

    asyncio.run(run())
    assert work.ended


@pytest.mark.parametrize(
    ("messages", "data", "too_long", "late"),
    [
        ([part(b"ab"), part(b"cd", False)], b"abcd", False, False),
        ([part(b"ab"), part(b"cde", False)], b"", True, False),
        ([part(b"ab")], b"", False, True),
        ([part(b"abcde")], b"", True, True),
    ],
)
def test_a_body_comes_whole_or_is_said_to_be_long_or_late(messages, data, too_long, late):
    body = asyncio.run(read_body(request_of(*messages), 4, 0.05))
    assert (body.data, body.too_long, body.late) == (data, too_long, late)


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (ApiError("no", 409, "f", "c"), 409, ("no", "invalid_request_error", "f", "c")),
        (KeyError("k"), 500, ("KeyError: 'k'", "server_error", None, None)),
    ],
)
def test_errors_of_a_route_have_openais_shape_and_only_ours_are_logged(error, status, body, caplog):
    app = FastAPI()

    async def fail():
        raise error

    async def work():
        return JSONResponse({})

    app.add_api_route("/fail", answering(fail, lambda e: refusal(e, "a request of ours")))
    app.add_api_route("/work", answering(work, lambda e: refusal(e, "another")))
    client = TestClient(app)
    response = client.get("/fail")
    assert response.status_code == status
    assert tuple(response.json()["error"].values()) == body
    assert ("a request of ours failed" in caplog.text) == (status == 500)
    assert client.get("/work").json() == {}


def test_an_event_is_one_line_of_json_after_its_id():
    assert event({"a": "é\n"}) == 'data: {"a": "é\\n"}\n\n'
    assert event({}, 7) == "id: 7\ndata: {}\n\n"


@pytest.mark.parametrize(
    ("reason", "status", "message"),
    [
        ({"type": "abort", "message": "shed", "status_code": 503}, 503, "shed"),
        ({"type": "abort"}, 500, "the server gave the request up"),
    ],
)
def test_an_output_that_was_aborted_is_an_error_with_sglangs_status(reason, status, message):
    with pytest.raises(ApiError, match=message) as raised:
        checked_meta({"meta_info": {"finish_reason": reason}})
    assert raised.value.status == status
    for fine in (None, {"type": "stop"}):
        assert checked_meta({"meta_info": {"finish_reason": fine, "n": 1}})["n"] == 1


def test_half_a_character_in_a_message_can_be_sent():
    assert json.loads(ApiError("\ud800").response().body)["error"]["message"] == "?"
