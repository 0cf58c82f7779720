"""JSON bodies are looked at before a route is."""

import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, model_validator
from starlette.testclient import TestClient

from sglang_ext.admission.bodies import JsonBodies


class Fragile(BaseModel):
    """As some of SGLang's: its validator takes a field to be an object."""

    format: Any = None

    @model_validator(mode="before")
    @classmethod
    def look(cls, values):
        return {"format": values["format"].get("type")}


@pytest.fixture
def client():
    app = FastAPI()
    app.add_middleware(JsonBodies, max_bytes=1 << 20)

    async def echo(request: Request):
        return {"length": len(await request.body())}

    async def fail():
        raise TypeError("not the body's")

    async def typed(body: Fragile):
        return body

    app.add_api_route("/echo", echo, methods=["POST"])
    app.add_api_route("/fail", fail, methods=["POST"])
    app.add_api_route("/separate_reasoning", fail, methods=["POST"])
    app.add_api_route("/typed", typed, methods=["POST"])
    return TestClient(app, raise_server_exceptions=False)


def post(client, body, kind="application/json"):
    return client.post("/echo", content=body, headers={"content-type": kind})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "not JSON"),
        ('{"a": NaN}', "not JSON"),
        (r'{"a": "\ud800"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested deeper than 100"),
        ("[1]", "must be a JSON object, not an array"),
        ("5", "must be a JSON object, not a number"),
        ("null", "must be a JSON object, not null"),
        ('"x"', "must be a JSON object, not a string"),
    ],
)
def test_what_no_route_can_use_is_a_400(client, body, message):
    response = post(client, body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_array_is_refused_whatever_it_is_called(client):
    assert post(client, "[]", "application/x-www-form-urlencoded").status_code == 400
    assert post(client, "nonsense", "text/plain").status_code == 200


@pytest.mark.parametrize("body", ["{}", "", '{"a":' * 99 + "1" + "}" * 99])
def test_a_body_comes_to_its_route_whole(client, body):
    response = post(client, body)
    assert response.json() == {"length": len(body)}


def test_a_body_over_the_limit_is_a_413(client):
    assert post(client, json.dumps({"a": "x" * (1 << 20)})).status_code == 413
    assert post(client, json.dumps({"a": "x" * ((1 << 20) - 100)})).status_code == 200


def test_forms_go_by(client):
    form = client.post("/echo", files={"file": b"x" * (2 << 20)})
    assert form.status_code == 200


def test_a_validator_that_fails_on_a_body_is_a_400(client):
    response = client.post("/typed", json={"format": True})
    assert response.status_code == 400
    assert "the body cannot be read: AttributeError" in response.json()["error"]["message"]
    assert client.post("/typed", json={"format": {"type": "x"}}).json() == {"format": "x"}


def test_what_fails_where_the_body_is_all_there_is_is_a_400(client):
    response = client.post("/separate_reasoning", json={"text": "x"})
    assert response.status_code == 400
    assert "the body cannot be read: TypeError" in response.json()["error"]["message"]


def test_a_route_that_fails_is_still_a_500(client):
    assert client.post("/fail", json={}).status_code == 500
