"""Where SGLang's application gets the routes of translation sessions, and its key guards them."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sglang_ext.api.app import extend
from sglang_ext.options import Options

HEADER = "x-sglang-ext-namespace"
PATH = "/v1/translation/sessions"


def paths(app):
    return {route.path for route in app.routes}


@pytest.mark.parametrize(("drafters", "there"), [("", False), ("random", False), ("ssbd", True)])
def test_the_routes_come_with_the_drafter(drafters, there, monkeypatch):
    monkeypatch.setenv("SGLANG_EXT_DRAFTERS", drafters)
    assert (PATH in paths(extend(FastAPI(), HEADER))) is there


def test_every_route_asks_for_sglangs_key(monkeypatch):
    from sglang.srt.utils.auth import add_api_key_middleware

    monkeypatch.setenv("SGLANG_EXT_DRAFTER", "ssbd")
    app = extend(FastAPI(), HEADER)
    add_api_key_middleware(app, api_key="secret", admin_api_key=None)
    client = TestClient(app)
    for method, end in [
        ("POST", ""),
        ("GET", "/trs-0"),
        ("DELETE", "/trs-0"),
        ("POST", "/trs-0/updates"),
        ("POST", "/trs-0/finish"),
        ("GET", "/trs-0/events"),
        ("GET", "/trs-0/ws"),
    ]:
        assert client.request(method, PATH + end, json={}).status_code == 401, end
    key = {"Authorization": "Bearer secret"}
    assert client.get(f"{PATH}/trs-0/ws", headers=key).status_code == 426


def test_defaults_are_those_that_are_documented():
    options = Options()
    limits = options.translation_sessions, options.translation_idle_seconds
    assert (*limits, options.translation_max_source_chars) == (1000, 600.0, 20_000)
