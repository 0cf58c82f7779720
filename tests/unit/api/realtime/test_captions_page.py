"""The captions page: small, whole in one file, and allowed to do only what it does."""

import base64
import hashlib
import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import AuthDecision

from sglang_ext.api.languages import NAMES
from sglang_ext.api.realtime import captions_page, realtime_events
from sglang_ext.api.realtime.captions_page import OVERLAY, PATH, let_in
from sglang_ext.api.realtime.views import VIEW
from speech.prompts import WhisperVocabulary

TEXT = Path(captions_page.__file__).with_name("captions.html").read_text(encoding="utf-8")
SCRIPT = re.findall(r"<script>(.*?)</script>", TEXT, re.S)[0]


@pytest.fixture(params=[True, False])
def whisper(request, monkeypatch):
    """Whether a Whisper is served."""
    monkeypatch.setattr(captions_page, "serves_whisper", lambda: request.param)
    return request.param


def answered(path):
    app = FastAPI()
    captions_page.register(app)
    with TestClient(app) as client:
        return client.get(path)


def test_the_page_is_there_where_a_whisper_is_served(whisper):
    answer = answered(PATH)
    assert answer.status_code == (200 if whisper else 404)
    if whisper:
        assert answer.text == TEXT and answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        for tag in ("script", "style"):
            content = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.S)
            assert len(content) == 1
            digest = hashlib.sha256(content[0].encode()).digest()
            assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy
        assert "default-src 'none'" in policy and "connect-src 'self';" in policy
        assert "unsafe" not in policy


def test_the_page_needs_no_key_and_all_else_does(whisper):
    def refuse(**given):
        return AuthDecision(allowed=False)

    for method, path, allowed in (
        ("GET", PATH, whisper),
        ("POST", PATH, False),
        ("GET", "/v1/models", False),
        ("GET", PATH + "/x", False),
        ("GET", OVERLAY, whisper),
    ):
        assert let_in(refuse, method=method, path=path, api_key="k").allowed == allowed


def test_the_page_is_under_60_kb_and_names_no_other_host():
    assert len(TEXT.encode()) < 60_000
    hosts = set(re.findall(r"(?:https?:|wss?:)?//([a-z0-9.-]+\.[a-z]+|localhost)", TEXT))
    assert hosts <= {"localhost"}
    # What a policy without 'unsafe-inline' would not run.
    assert not re.search(r"<[^>]+\s(?:on[a-z]+|style)=", TEXT)


def test_the_page_reads_the_events_that_sessions_send():
    assert f'"{realtime_events.TAIL}"' in SCRIPT
    told = set(re.findall(r'event\.type === "([a-z_.]+)"', SCRIPT))
    sent = Path(realtime_events.__file__).parent
    source = "".join(p.read_text() for p in sent.glob("realtime_*.py"))
    assert f'"{realtime_events.OUTPUT_TAIL}"' in SCRIPT
    sent_output = realtime_events.transcript_event("output", "", 0)["type"]
    assert f'OUTPUT = "{sent_output}"' in SCRIPT
    for kind in told - {"session.created", "session.updated"}:
        last = kind.rpartition(".")[2].removeprefix("speech_")
        assert last in source, kind


def test_the_page_offers_whispers_languages():
    offered = re.findall(r'LANGUAGES = "([a-z ]+)"', SCRIPT)[0].split()
    known = WhisperVocabulary(51_866).languages
    assert offered == list(known)


def test_the_page_offers_translations_where_there_is_a_text_server(whisper, monkeypatch):
    if not whisper:
        return
    app = FastAPI()
    captions_page.register(app)
    for url, offers in (("", ""), ("http://localhost:30001", "yes")):
        monkeypatch.setenv("SGLANG_EXT_TRANSLATE_WITH", url)
        with TestClient(app) as client:
            text = client.get(PATH).text
        assert re.findall(r'data-translates="(.*?)"', text) == [offers]
        # What the policy allows is the same in both.
        assert re.findall(r"<(script|style)>(.*?)</", text, re.S) == re.findall(
            r"<(script|style)>(.*?)</", TEXT, re.S
        )


def test_the_page_translates_into_languages_that_have_a_name():
    offered = re.findall(r'LANGUAGES = "([a-z ]+)"', SCRIPT)[0].split()
    assert {code for code in offered if len(code) == 2 and code != "jw"} <= NAMES.keys()


def test_the_overlay_is_a_page_of_its_own_that_reads_views(whisper):
    answer = answered(OVERLAY)
    assert answer.status_code == (200 if whisper else 404)
    if whisper:
        text, policy = answer.text, answer.headers["content-security-policy"]
        assert f'"{VIEW}"' in text and "background: transparent" in text
        assert len(text.encode()) < 10_000 and "unsafe" not in policy
        for tag in ("script", "style"):
            (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
        # Read-only: nothing to operate, and no other host.
        assert not re.search("<(button|input|select|form|a)[ >]|//[a-z0-9.-]+[.][a-z]+", text)
