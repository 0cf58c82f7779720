"""/openapi.json describes every route of ours, and what it describes is what they do."""

import sys
from types import SimpleNamespace

import jsonschema
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from pydantic import TypeAdapter

from sglang_ext.api import openapi
from sglang_ext.api.app import extend
from sglang_ext.api.datastore import protocol
from sglang_ext.api.datastore import routes as datastore_routes
from sglang_ext.api.datastore.answers import AddedCorpus
from sglang_ext.api.datastore.control import serve
from sglang_ext.api.http import ApiError
from sglang_ext.api.predicted_outputs import PredictedContent, describe_field, text_of
from sglang_ext.api.realtime import captions_page
from sglang_ext.api.transcription import transcriptions
from sglang_ext.api.transcription.transcriber import Delta
from sglang_ext.api.transcription.transcription_answers import TextAnswer, VerboseAnswer
from sglang_ext.api.translation import session_routes
from sglang_ext.api.translation.session_routes import Backend
from sglang_ext.api.translation.session_settings import SECRETS, SessionSettings
from sglang_ext.api.translation.session_table import SessionTable
from sglang_ext.api.translation.translator import Translator
from sglang_ext.options import Options
from speech.prompts import WhisperVocabulary
from speech.segments import Transcript
from tests.unit.api.datastore.fake_store import Keeper, Store
from tests.unit.api.fake_manager import ByteTokenizer, FakeManager, Request

HEADER = "x-tenant"
AUDIO = "/v1/audio/transcriptions"
SESSIONS = "/v1/translation/sessions"
EXAMPLES = 12


class Work:
    """Stands in for a Transcription that hears one word."""

    def __init__(self, engine, request, limits, aligner):
        pass

    async def run(self):
        for event in (Delta("Hé"), Transcript("transcribe", "en", text="Hé", duration=1.5)):
            yield event


@pytest.fixture
def app(tmp_path, monkeypatch):
    """All our routes in one application, with SGLang's refusals, and fakes behind them."""
    from sglang.srt import runtime_context
    from sglang.srt.entrypoints import http_server

    io_struct = SimpleNamespace(GenerateReqInput=Request)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    spec = SimpleNamespace(speculative_ngram_external_corpus_max_tokens=1000)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    monkeypatch.setenv("SGLANG_EXT_DRAFTERS", "ssbd")
    monkeypatch.setenv(protocol.FOLDER_VARIABLE, str(tmp_path))
    manager = FakeManager()
    backend = Backend(
        Translator(manager), SessionTable(1000, 60, lambda: manager.gracefully_exit), Options()
    )
    tokenizer = SimpleNamespace(tokenizer=ByteTokenizer())
    engine = SimpleNamespace(vocabulary=WhisperVocabulary(51_865), model_names=["w"])
    for module, name, value in (
        (session_routes, "_backend", lambda: backend),
        (datastore_routes, "tokenizer_manager", lambda: tokenizer),
        (transcriptions, "_engine", lambda: engine),
        (transcriptions, "_options", Options),
        (transcriptions, "Transcription", Work),
        (transcriptions, "serves_whisper", lambda: True),
        (captions_page, "serves_whisper", lambda: True),
    ):
        monkeypatch.setattr(module, name, value)
    app = FastAPI()
    app.exception_handlers.update(http_server.app.exception_handlers)
    transcriptions.register(app)
    captions_page.register(app)
    server = serve([Keeper(Store())])
    yield extend(app, HEADER)
    server.shutdown()
    server.server_close()


def operations(app):
    """Each described operation of ours, by method and path."""
    return {
        (method.upper(), path): operation
        for path, item in app.openapi()["paths"].items()
        for method, operation in item.items()
        if openapi.TAG in operation.get("tags", ())
    }


def test_every_route_is_described_with_its_answers_and_its_refusals(app):
    routes = {
        (method, route.path_format)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    described = operations(app)
    assert routes | {("GET", "/captions"), ("GET", "/captions/overlay")} == described.keys()
    for asked, operation in described.items():
        good = [answer for status, answer in operation["responses"].items() if status < "3"]
        assert (good and good[0]["content"]) or asked[1].endswith("/ws"), asked
        assert "4XX" in operation["responses"] or asked[1].startswith("/captions"), asked
    bodies = {asked for asked, operation in described.items() if "requestBody" in operation}
    assert bodies == {
        ("POST", "/datastore/namespaces/name"),
        ("POST", "/datastore/corpora"),
        ("POST", SESSIONS),
        ("POST", SESSIONS + "/{session_id}/updates"),
        ("POST", AUDIO),
        ("POST", "/v1/audio/translations"),
    }


def test_the_schema_is_one_that_openapi_tools_read(app):
    from referencing import Registry, Resource
    from referencing.jsonschema import DRAFT202012

    schema = app.openapi()
    resolver = Registry().with_resource("", Resource(schema, DRAFT202012)).resolver()

    def follow(part):
        if isinstance(part, dict):
            if "$ref" in part:
                resolver.lookup(part["$ref"])
            for inner in part.values():
                follow(inner)
        elif isinstance(part, list):
            for inner in part:
                follow(inner)

    follow(schema)


def test_another_models_schema_has_sglangs_audio_route_and_no_page(monkeypatch):
    for module in (transcriptions, captions_page):
        monkeypatch.setattr(module, "serves_whisper", lambda: False)
    app = FastAPI()

    async def sglangs(file: str):
        """SGLang's own."""

    app.add_api_route(AUDIO, sglangs, methods=["POST"])
    transcriptions.register(app)
    captions_page.register(app)
    paths = app.openapi()["paths"]
    assert set(paths) == {AUDIO}
    assert paths[AUDIO]["post"]["description"] == "SGLang's own."


def test_a_whispers_schema_has_our_audio_route_in_place_of_sglangs(app):
    app.add_api_route(AUDIO, lambda: None, methods=["POST"])
    form = operations(app)["POST", AUDIO]["requestBody"]["content"]["multipart/form-data"]
    assert set(form["schema"]["required"]) == {"file", "model"}
    assert "timestamp_granularities[]" in form["schema"]["properties"]


def test_a_shown_session_has_the_described_settings_without_secrets(app):
    with TestClient(app) as client:
        body = {"source_language": "en", "target_language": "fr"}
        shown = client.post(SESSIONS, json=body).json()
    described = app.openapi()["components"]["schemas"]["SessionAnswer"]["properties"]
    assert shown.keys() == described.keys()
    assert SessionSettings.model_fields.keys() - SECRETS < described.keys()
    assert not SECRETS & described.keys()


def test_what_is_taken_answers_as_described(app):
    form = {"model": "w", "language": "en"}
    answered = 0
    with TestClient(app) as client:
        corpus = client.post("/datastore/corpora", json={"documents": ["ab"], "namespace": "a"})
        AddedCorpus.model_validate(corpus.json(), strict=True)
        for name in ("json", "text", "verbose_json", "srt", "vtt"):
            fields = form | {"response_format": name, "timestamp_granularities[]": "segment"}
            heard = client.post(AUDIO, data=fields, files={"file": b"audio"})
            described = operations(app)["POST", AUDIO]["responses"]["200"]["content"]
            assert heard.headers["content-type"].partition(";")[0] in described, heard.text
            if name in ("json", "verbose_json"):
                TypeAdapter(TextAnswer | VerboseAnswer).validate_python(heard.json(), strict=True)
                answered += 1
        streamed = client.post(AUDIO, data=form | {"stream": "true"}, files={"file": b"audio"})
        assert streamed.headers["content-type"].partition(";")[0] in described
    assert answered == 2


def test_no_request_of_schemathesis_gets_a_5xx_or_an_answer_that_is_not_described(app):
    schemathesis = pytest.importorskip("schemathesis", reason="Schemathesis is not installed")
    from scripts.lib.openapi_fuzz import fuzz

    with TestClient(app) as client:
        body = {"source_language": "en", "target_language": "fr"}
        sessions = [client.post(SESSIONS, json=body).json()["id"] for _ in range(8)]
        known = {"session_id": sessions, "namespace": ["a"], "rid": ["r"], "corpus": ["c"]}
        schema = schemathesis.openapi.from_asgi("/openapi.json", app)
        found = list(fuzz(schema, EXAMPLES, known))
    assert len(found) == len(operations(app))
    assert [line for answers in found for line in answers.errors + answers.unexpected] == []
    accepted = {answers.operation for answers in found if answers.statuses[200]}
    assert {"GET /datastore", f"POST {SESSIONS}/{{session_id}}/finish"} <= accepted


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "content", "content": "a"},
        {"type": "content", "content": ""},
        {"type": "content", "content": [{"type": "text", "text": "a"}, "b"], "more": 1},
        {"type": "content", "content": []},
        {"type": "content", "content": [{"type": "image", "text": "a"}]},
        {"type": "content", "content": 5},
        {"type": "content"},
        {"type": "text", "content": "a"},
        {"content": "a"},
        {"type": "content", "content": "a" * 300_000},
        "a",
        [],
    ],
    ids=lambda given: str(given)[:60],
)
def test_what_is_described_of_a_prediction_is_what_is_taken(prediction):
    described = jsonschema.Draft202012Validator(PredictedContent.model_json_schema())
    try:
        text_of(prediction)
        taken = True
    except ApiError:
        taken = False
    assert described.is_valid(prediction) is taken


def test_chat_completions_are_described_with_their_prediction():
    schema = {"components": {"schemas": {"ChatCompletionRequest": {"properties": {"model": {}}}}}}
    describe_field(schema)
    schemas = schema["components"]["schemas"]
    field = schemas["ChatCompletionRequest"]["properties"]["prediction"]
    assert field["anyOf"][0] == {"$ref": "#/components/schemas/PredictedContent"}
    assert "PredictedPart" in schemas and "model" in schemas["ChatCompletionRequest"]["properties"]
    describe_field({"paths": {}})  # an application without chat completions stays as it is
