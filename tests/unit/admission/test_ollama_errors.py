"""Refusals on SGLang's Ollama routes reach the client."""

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient

from sglang_ext.admission.ollama import OllamaErrors


@pytest.fixture
def client():
    app = FastAPI()
    app.add_middleware(OllamaErrors)

    def lines(good: int):
        async def stream():
            for _ in range(good):
                yield b"{}\n"
            raise ValueError("too long \ud800")

        return StreamingResponse(stream())

    async def refuse():
        raise ValueError("too long")

    app.add_api_route("/api/chat", lines, methods=["POST"])
    app.add_api_route("/api/generate", refuse, methods=["POST"])
    app.add_api_route("/other", refuse, methods=["POST"])
    return TestClient(app, raise_server_exceptions=False)


def test_a_refusal_before_the_first_line_is_a_400(client):
    for response in (client.post("/api/generate"), client.post("/api/chat?good=0")):
        assert response.status_code == 400
        assert response.json()["error"].startswith("too long")


def test_a_failure_within_a_stream_is_its_last_line(client):
    response = client.post("/api/chat?good=2")
    assert response.status_code == 200
    assert response.text.splitlines() == ["{}", "{}", '{"error":"too long ?"}']


def test_other_routes_are_left_alone(client):
    assert client.post("/other").status_code == 500
