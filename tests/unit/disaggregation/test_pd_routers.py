"""Both routers between a client and stub servers: which headers and deletions arrive."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sglang_ext.disaggregation.mini_router import AUTHORIZATION, extend
from sglang_ext.options import env_name
from sglang_ext.servers.processes import free_port, kill_group, start
from tests.eventually import eventually

pytest.importorskip("sglang_router", reason="sglang-router is not installed (extra pd)")

HEADER = "x-request-id-tenant"  # one that both carry
INFO = {
    "model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1, "is_generation": True,
    "version": "0.5.23",
}  # fmt: skip
ANSWER = {
    "id": "1", "object": "chat.completion", "created": 1, "model": "m", "text": "x",
    "meta_info": {},
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip


class Stub(ThreadingHTTPServer):
    """A server that keeps the headers of what it is asked, and answers deletions as told."""

    daemon_threads = True

    def __init__(self, deletion: tuple[int, dict] = (200, {"deleted_tokens": 1})):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, list[tuple[str, str]]]] = []
        self.deletion = deletion
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def headers_of(self, path: str) -> dict[str, list[str]]:
        """Of the last request for a path: the values by the name in lower case."""
        found: dict[str, list[str]] = {}
        for name, value in next(h for _, p, h in reversed(self.asked) if p == path):
            found.setdefault(name.lower(), []).append(value)
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Stub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, INFO)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if json.loads(body or b"{}").get("stream"):
            self._send(200, b"data: {}\n\ndata: [DONE]\n\n", "text/event-stream")
        else:
            self._answer(200, ANSWER)

    def do_DELETE(self) -> None:
        self._answer(*self.server.deletion)

    def _answer(self, status: int, body: dict) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.server.asked.append((self.command, self.path, list(self.headers.items())))
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Routed:
    """A router process in front of stubs."""

    def __init__(self, router: str, prefill: Stub, decodes: list[Stub]):
        self.prefill, self.decodes = prefill, decodes
        port = free_port()
        module = {
            "mini": "sglang_ext.disaggregation.mini_router", "rust": "sglang_router.launch_router",
        }[router]  # fmt: skip
        command = [sys.executable, "-m", module, "--pd-disaggregation", "--host", "127.0.0.1"]
        command += ["--mini-lb"] if router == "mini" else ["--prometheus-port", str(free_port())]
        command += ["--port", str(port), "--prefill", prefill.url, "1"]
        for decode in decodes:
            command += ["--decode", decode.url]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(env_name("namespace_header"), HEADER)
            self.process = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def wait(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, "the router ended"
            try:
                return self.client.post("/generate", json={"text": "x"}).status_code == 200
            except httpx.HTTPError:
                return False

        eventually(answers, what="the router answers")


@pytest.fixture(scope="module", params=["mini", "rust"])
def routed(request) -> Iterator[Routed]:
    made = Routed(request.param, Stub((404, {"error": {"message": "none"}})), [Stub()])
    try:
        made.wait()
        yield made
    finally:
        kill_group(made.process)


@pytest.fixture(scope="module")
def mini() -> Iterator[Routed]:
    """Two decode servers, of which one follows the other's datastore."""
    refusing = (404, {"error": {"message": "this server has no datastore"}})
    follower = (409, {"error": {"message": "delete there as well"}})
    made = Routed("mini", Stub(refusing), [Stub((200, {"deleted_tokens": 7})), Stub(follower)])
    try:
        made.wait()
        yield made
    finally:
        kill_group(made.process)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "m", "prompt": "x"}),
    ],
)
def test_tenant_and_key_reach_both_servers(path, body, stream, routed):
    for tenant in ("acme", "globex"):
        headers = {HEADER: tenant, "Authorization": f"Bearer {tenant}"}
        answer = routed.client.post(path, json=body | {"stream": stream}, headers=headers)
        assert answer.status_code == 200, answer.text
        for server in (routed.prefill, *routed.decodes):
            found = server.headers_of(path)
            assert found[HEADER] == [tenant] and found[AUTHORIZATION] == [f"Bearer {tenant}"]
    routed.client.post(path, json=body)
    for server in (routed.prefill, *routed.decodes):
        assert HEADER not in server.headers_of(path)  # nothing of an earlier request's
        assert AUTHORIZATION not in server.headers_of(path)


def test_several_values_arrive_as_several_and_other_headers_do_not(mini):
    headers = [(HEADER, "a"), (HEADER, "b"), ("x-other", "c")]
    assert mini.client.post("/generate", json={"text": "x"}, headers=headers).is_success
    found = mini.prefill.headers_of("/generate")
    assert found[HEADER] == ["a", "b"] and "x-other" not in found


@pytest.mark.parametrize(
    "path", ["/datastore/namespaces/a%20b", "/datastore/requests/order/66?namespace=a%2Fb"]
)
def test_a_deletion_reaches_every_server_with_its_key(path, mini):
    answer = mini.client.delete(path, headers={"Authorization": "Bearer admin"})
    assert answer.json() == {"deleted_tokens": 7}
    for server in (mini.prefill, *mini.decodes):
        assert server.asked[-1][:2] == ("DELETE", path)
        assert server.headers_of(path)[AUTHORIZATION] == ["Bearer admin"]


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "Unauthorized"), (400, "namespace must be"), (404, "no datastore"), (500, "broken")],
)
def test_a_deletion_that_fails_anywhere_is_an_error(status, message, mini, monkeypatch):
    for server in mini.decodes:
        reply = (status, {"error": {"message": message}})
        monkeypatch.setattr(server, "deletion", reply)
    answer = mini.client.delete("/datastore/namespaces/a")
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert mini.decodes[0].url in answer.json()["error"]["message"] or status == 404


def test_a_deletion_that_one_server_misses_says_so(mini, monkeypatch):
    monkeypatch.setattr(mini.decodes[1], "deletion", (503, {"error": {"message": "hung up"}}))
    answer = mini.client.delete("/datastore/namespaces/a")
    assert answer.status_code == 503
    assert "hung up; 1 of 3 servers did" in answer.json()["error"]["message"]


def test_a_server_that_is_down_is_said_in_openais_shape():
    module = SimpleNamespace(app=FastAPI())
    extend(module, HEADER)

    @module.app.post("/generate")
    async def generate():
        async with module.aiohttp.ClientSession() as session:
            await session.post(f"http://127.0.0.1:{free_port()}/generate")

    answer = TestClient(module.app).post("/generate")
    error = answer.json()["error"]
    assert answer.status_code == 503 and error["code"] == "server_unavailable"
    assert "try again" in error["message"] and "127.0.0.1" not in error["message"]


def test_a_server_that_takes_too_long_is_said_in_openais_shape():
    module = SimpleNamespace(app=FastAPI())
    extend(module, HEADER)

    @module.app.post("/generate")
    async def generate():
        raise TimeoutError

    answer = TestClient(module.app).post("/generate")
    error = answer.json()["error"]
    assert answer.status_code == 504 and error["code"] == "server_timeout"
