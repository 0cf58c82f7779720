"""The namespace header, the datastore's HTTP routes and the control socket, without a server."""

import asyncio
import json
import socket
import stat
import threading

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from datastores import DatastoreInUse
from sglang_ext.admission.cache_salts import salt_namespace
from sglang_ext.api.app import extend
from sglang_ext.api.datastore import protocol
from sglang_ext.api.datastore.control import ControlError, ControlServer, reply, serve
from sglang_ext.api.datastore.control_client import call, call_all
from sglang_ext.api.namespaces import with_header
from sglang_ext.request_options import RequestOptionError
from tests.unit.api.datastore.fake_drafters import Owner, Plain

HEADER = "x-tenant"


@pytest.fixture(scope="module")
def app():
    """An application that answers with the custom_params of a task started for the request."""
    app = FastAPI()

    @app.post("/generate")
    async def generate(body: dict):
        async def one(params):
            return with_header(params, HEADER)

        try:
            params = [one(body.get("custom_params")) for _ in range(2)]
            return await asyncio.gather(*params)
        except RequestOptionError as error:
            return {"error": str(error)}

    return TestClient(extend(extend(app, HEADER), HEADER))


@pytest.mark.parametrize(
    ("header", "params", "expected"),
    [
        (None, None, None),
        (None, {"namespace": "a"}, {"namespace": "a"}),
        ("acme", None, {"namespace": "acme"}),
        ("acme", {"ingest": False}, {"ingest": False, "namespace": "acme"}),
        ("acme", {"namespace": "acme"}, {"namespace": "acme"}),
    ],
)
def test_the_header_joins_custom_params(header, params, expected, app):
    headers = {} if header is None else {"X-Tenant": header}
    got = app.post("/generate", json={"custom_params": params}, headers=headers).json()
    assert got == [expected, expected]


@pytest.mark.parametrize(
    ("values", "params", "message"),
    [
        (["a"], {"namespace": "b"}, "namespace 'b' contradicts the header x-tenant: a"),
        (["a", "b"], None, "the header x-tenant comes with several values"),
        (["a/b"], None, "the header x-tenant must be 1 to 128 characters"),
        ([""], None, "the header x-tenant must be 1 to 128 characters"),
    ],
)
def test_a_header_that_cannot_be_is_named(values, params, message, app):
    headers = [("x-tenant", value) for value in values]
    got = app.post("/generate", json={"custom_params": params}, headers=headers).json()
    assert message in got["error"]


def test_one_request_never_sees_anothers_header(app):
    app.post("/generate", json={}, headers={"x-tenant": "a"})
    assert app.post("/generate", json={}).json() == [None, None]


def test_the_name_of_salts_can_be_asked_for(app):
    asked = app.post("/datastore/namespaces/name", json={"cache_salt": "pepper"})
    assert asked.json() == {"namespace": salt_namespace(None, "pepper", "")}
    for body in ({}, {"cache_salt": ""}):
        refused = app.post("/datastore/namespaces/name", json=body)
        assert refused.status_code == 400 and "cache_salt" in refused.json()["error"]["message"]


class FakeDatastore:
    """Two namespaces, and a flush that can be slow."""

    def __init__(self):
        self.tokens = {"a": 5, "b": 7}
        self.num_tokens = 12
        self.refusal: Exception | None = None

    def namespaces(self):
        return self.tokens

    def flush(self, timeout):
        if timeout < 1:
            raise TimeoutError("still sorting")

    def delete_namespace(self, namespace):
        if self.refusal is not None:
            raise self.refusal
        return self.tokens.pop(namespace, 0)

    def delete_document(self, name, namespace):
        return 3 if name == "chatcmpl/1" and namespace in (None, "a") else 0


class Keeper(Plain):
    """Is told of deletions."""

    def __init__(self, told):
        self._told = told

    def forget(self, *args):
        self._told.append(args)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(protocol.FOLDER_VARIABLE, str(folder))
        store = FakeDatastore()
        told = []
        server = serve([Keeper(told), Owner(store), Plain()])
    yield folder, store, told
    server.shutdown()
    server.server_close()


@pytest.fixture
def control(served, monkeypatch):
    folder, store = served[:2]
    monkeypatch.setenv(protocol.FOLDER_VARIABLE, str(folder))
    store.tokens = {"a": 5, "b": 7}


def test_routes_reach_the_datastore(app, control):
    assert app.get("/datastore/namespaces").json() == {"namespaces": {"a": 5, "b": 7}}
    assert app.post("/datastore/flush").json() == {"tokens": 12}
    assert app.delete("/datastore/namespaces/a").json() == {"deleted_tokens": 5}
    assert app.delete("/datastore/namespaces/a").json() == {"deleted_tokens": 0}
    assert app.delete("/datastore/requests/chatcmpl/1").json() == {"deleted_tokens": 3}
    other = app.delete("/datastore/requests/chatcmpl/1", params={"namespace": "b"})
    assert other.json() == {"deleted_tokens": 0}


def test_deletions_reach_drafters_and_translation_sessions(app, served, control):
    told, closed = served[2], []
    app.app.state.forget_sessions = lambda *args: closed.append(args)
    told.clear()
    try:
        assert app.delete("/datastore/namespaces/b").is_success
        assert app.delete("/datastore/requests/r/1").is_success
        assert app.delete("/datastore/requests/r/1", params={"namespace": "a"}).is_success
    finally:
        del app.app.state.forget_sessions
    assert told == closed == [("b", None), (None, "r/1"), ("a", "r/1")]


def test_what_is_another_servers_business_is_a_409(app, served, control, monkeypatch):
    monkeypatch.setattr(served[1], "refusal", DatastoreInUse("ask that server"))
    served[2].clear()
    response = app.delete("/datastore/namespaces/a")
    assert response.status_code == 409 and "ask that server" in response.text
    assert served[2] == [("a", None)]


def test_ranks_that_share_a_datastore_answer_as_one(app, served, control, monkeypatch):
    member = FakeDatastore()
    member.tokens, member.num_tokens = {"a": 5, "c": 1}, 6
    second = serve([Owner(member)], rank=1)
    try:
        found = app.get("/datastore/namespaces").json()
        assert found == {"namespaces": {"a": 5, "b": 7, "c": 1}}
        assert app.post("/datastore/flush").json() == {"tokens": 12}
        # One leaves it to the other; whether all do is another matter.
        member.refusal = DatastoreInUse("ask that server")
        assert app.delete("/datastore/namespaces/a").json() == {"deleted_tokens": 5}
        monkeypatch.setattr(served[1], "refusal", DatastoreInUse("ask that server"))
        assert app.delete("/datastore/namespaces/b").status_code == 409
    finally:
        second.shutdown()
        second.server_close()


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("DELETE", "/datastore/namespaces/a%20b", 400, "namespace must be 1 to 128 characters"),
        ("DELETE", "/datastore/requests/r?namespace=%2F", 400, "namespace must be"),
        ("POST", "/datastore/flush?timeout=0.5", 504, "still sorting"),
    ],
)
def test_errors_have_openais_shape(method, path, status, message, app, control):
    response = app.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"] and error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}


def test_every_route_asks_for_sglangs_admin_key(control):
    from sglang.srt.utils.auth import add_api_key_middleware

    app = FastAPI()
    extend(app, HEADER)
    add_api_key_middleware(app, api_key=None, admin_api_key="secret")
    client = TestClient(app)
    for method, path in [
        ("GET", "/datastore"),
        ("POST", "/datastore/flush"),
        ("GET", "/datastore/namespaces"),
        ("DELETE", "/datastore/namespaces/a"),
        ("DELETE", "/datastore/requests/r"),
    ]:
        assert client.request(method, path).status_code == 401, path
    key = {"Authorization": "Bearer secret"}
    assert client.get("/datastore/namespaces", headers=key).status_code == 200


def test_a_corpus_that_is_no_json_is_a_400():
    app = extend(FastAPI(), HEADER)

    async def parse(request: Request):
        return await request.json()

    app.add_api_route("/add_external_corpus", parse, methods=["POST"])
    app.add_api_route("/other", parse, methods=["POST"])
    client = TestClient(app, raise_server_exceptions=False)
    text = {"content-type": "text/plain"}  # which routes may read as they like
    response = client.post("/add_external_corpus", content=b"nonsense", headers=text)
    assert response.status_code == 400 and "not JSON" in response.json()["error"]["message"]
    assert client.post("/other", content=b"nonsense", headers=text).status_code == 500


def test_without_a_datastore_the_routes_say_so(app, tmp_path, monkeypatch):
    monkeypatch.setenv(protocol.FOLDER_VARIABLE, str(tmp_path))
    response = app.get("/datastore/namespaces")
    assert response.status_code == 404 and "no datastore" in response.text
    (tmp_path / "scheduler-0.sock").write_text("")
    assert app.get("/datastore/namespaces").status_code == 503


def test_data_parallel_ranks_are_summed(app, control):
    second = serve([Owner(FakeDatastore())], rank=1)
    try:
        assert app.delete("/datastore/namespaces/a").json() == {"deleted_tokens": 10}
    finally:
        second.shutdown()
        second.server_close()


def test_the_socket_is_for_this_user_only(control):
    mode = protocol.socket_path(0).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        (b"\xff\xfe\n", 400, "expected one JSON object"),
        (b"[1]\n", 400, "expected a JSON object with op one of"),
        (b'{"op": "drop"}\n', 400, "op one of info"),
        (b'{"op": "delete_namespace"}\n', 400, "namespace must be"),
        (b'{"op": "delete_request", "rid": 5}\n', 400, "rid must be"),
        (b'{"op": "flush", "timeout": "1"}\n', 400, "timeout must be"),
        (b'{"op": "add_corpus", "file": "/etc/passwd"}\n', 400, "file must be in"),
        (b'{"op": "namespaces", "x": "' + b"y" * protocol.MAX_LINE + b'"}\n', 413, "longer than"),
    ],
)
def test_whatever_is_sent_costs_an_error_reply_only(line, status, message, control):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(protocol.socket_path(0)))
        connection.sendall(line)
        answer = json.loads(connection.makefile().readline())
    assert answer["status"] == status and message in answer["error"]
    assert call_all("namespaces") == [{"a": 5, "b": 7}]


def test_an_operation_that_breaks_is_a_500():
    def broken(_request):
        raise KeyError("x")

    assert reply(broken, b"{}")["status"] == 500


def test_a_datastore_that_hangs_times_out_and_others_are_served(tmp_path):
    release = threading.Event()

    def operations(request):
        return release.wait(5) if request["op"] == "hang" else "done"

    server = ControlServer(tmp_path / "s", operations).start()
    try:
        with pytest.raises(ControlError, match="did not answer hang") as raised:
            call(tmp_path / "s", "hang", 0.2)
        assert raised.value.status == 504
        assert call(tmp_path / "s", "other") == "done"
    finally:
        release.set()
        server.shutdown()
        server.server_close()
