"""Requests that ended a scheduler, a few hundred that might, and a valid one after them."""

import json

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from scripts.fuzz_server import BLOCK, FuzzRun
from scripts.lib.fuzz_client import FuzzClient
from scripts.lib.fuzz_grammar import VOCABULARY, classes
from scripts.lib.http_client import HTTP
from tests.server.conftest import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
OF_EACH_CLASS = 25  # scripts/fuzz_server.py has thousands
SHORT = {"temperature": 0, "max_new_tokens": 8}


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def generate(sampling=None, **fields):
    return "/generate", {"text": "x", "sampling_params": {**SHORT, **(sampling or {})}, **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        generate({"min_new_tokens": 5, "stop_token_ids": [VOCABULARY]}),
        generate({"min_new_tokens": 5, "stop_token_ids": [VOCABULARY + 1]}),
        generate({"min_new_tokens": 5, "stop_token_ids": [-1]}),
        ("/v1/chat/completions", CHAT | {"min_tokens": 5, "stop_token_ids": [VOCABULARY]}),
        generate(text=None, input_ids=[VOCABULARY]),
        generate(text=None, input_ids=[[1], [-1]]),
        ("/v1/completions", {"model": MODEL, "prompt": [VOCABULARY], "max_tokens": 4}),
        generate(text=""),
        generate(text=None, input_ids=[]),
        ("/v1/completions", {"model": MODEL, "prompt": "", "max_tokens": 4}),
        generate(lora_id=["a"]),
        generate(positional_embed_overrides=[]),
        generate(return_logprob=True, logprob_start_len=-5),
        generate(return_logprob=True, top_logprobs_num=100_000),
        generate(return_logprob=True, top_logprobs_num=-1),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 100_000}),
        generate({"n": 1 << 31}),
        ("/v1/chat/completions", CHAT | {"n": 1 << 31}),
        generate({"top_k": 1 << 31}),
        generate({"min_new_tokens": 1 << 31, "max_new_tokens": None}),
        generate({"stop_regex": "(a+)+b", "regex": "a{40}"}),
        generate({"ebnf": "root ::= root", "temperature": 0}),
        generate({"ebnf": "root ::= root", "temperature": 1, "top_k": 5}),
        generate({"ebnf": 'root ::= "a" b\nb ::= b', "temperature": 1, "top_p": 0.5}),
        ("/v1/chat/completions", CHAT | {"ebnf": "root ::= root", "temperature": 1, "top_k": 5}),
        generate({"stream_interval": "x"}, stream=False),
        generate({"is_normalized": True}),
        generate({"custom_params": "x"}),
        generate({"custom_params": [1]}),
        generate({"custom_params": nested(90)}),
        generate({"custom_params": nested(900)}),
        generate(rid="x" * 600),
        generate(text="\ud800"),
        ("/remove_external_corpus", ["x"]),
        ("/remove_external_corpus", "x"),
        ("/add_external_corpus", 5),
        ("/parse_function_call", {"text": "x"}),
        ("/separate_reasoning", {"text": "x", "reasoning_parser": "none"}),
    ],
)
def test_what_ended_a_scheduler_or_was_a_500_is_a_400(path, body, sssd_server):
    answer = HTTP.post(
        sssd_server.base_url + path,
        content=json.dumps(body),
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 400, answer.text
    assert HTTP.get(sssd_server.base_url + "/health", timeout=60).is_success


def test_the_longest_request_id_can_be_deleted(sssd_server):
    path, body = generate(rid="r" * 512)
    assert HTTP.post(sssd_server.base_url + path, json=body, timeout=60).is_success
    deleted = HTTP.delete(f"{sssd_server.base_url}/datastore/requests/{'r' * 512}", timeout=60)
    assert deleted.is_success, deleted.text


def test_a_fuzzed_server_answers_all_and_stays_the_same(sssd_server):
    run = FuzzRun(sssd_server.base_url, sssd_server.pid, seed=7, most_tokens=16)
    kinds = len(classes(MODEL))
    for first in range(0, kinds * BLOCK, BLOCK):
        assert run.send(first, OF_EACH_CLASS) == first + OF_EACH_CLASS
    figures = run.figures()
    assert figures["requests"] == kinds * OF_EACH_CLASS and figures["accepted"] > 0
    assert run.is_good(), figures


def open_socket(server, **options):
    url = server.base_url + "/v1/translation/sessions"
    settings = {"source_language": "en", "target_language": "fr", "max_tokens": 4}
    session = HTTP.post(url, json=settings, timeout=60).json()["id"]
    return connect(
        f"{url.replace('http', 'ws', 1)}/{session}/ws", proxy=None, max_size=None, **options
    )


def test_websockets_do_not_inflate(sssd_server):
    with open_socket(sssd_server, compression="deflate") as socket:
        assert not socket.protocol.extensions


def test_a_message_over_the_limit_is_not_kept(sssd_server):
    with open_socket(sssd_server) as socket:
        socket.send(json.dumps({"append": "x" * 700_000}))
        error = json.loads(socket.recv(timeout=60))["error"]
        assert error["code"] == "body_too_large"
        with pytest.raises(ConnectionClosed):
            socket.send("x" * (2 << 20))
            socket.recv(timeout=60)
    assert FuzzClient(sssd_server.base_url).known()
