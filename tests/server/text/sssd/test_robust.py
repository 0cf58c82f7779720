"""Bad input, aborts and pressure: each gets an answer, and the server goes on."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.http_client import HTTP, lines
from sglang_ext.cpu.fork_server import FORK_SERVER_VARIABLE
from sglang_ext.servers.processes import free_port
from sglang_ext.servers.started_server import serve_command
from tests.eventually import eventually
from tests.server.conftest import MODEL
from tests.server.servers import Server
from tests.server.text.answers import answer, answers

ROOT = Path(__file__).parents[4]
CONTEXT = 512
FIRST_WORD = 3  # of sglang-ext's, behind python -m sglang_ext.cli
SSSD = ["--speculative-algorithm", "SSSD"]


def post(server: Server, path: str, body: dict, timeout: float = 300):
    return HTTP.post(server.base_url + path, json=body, timeout=timeout)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"drafter": "eagle"}, "custom_params.drafter must be one of"),
        ({"draft_length": -3}, "custom_params.draft_length"),
        ({"ingest": 1}, "custom_params.ingest"),
    ],
)
def test_bad_request_options_get_a_400(params, message, sssd_server, prompts):
    body = {"input_ids": prompts[0].input_ids, "sampling_params": {"custom_params": params}}
    response = post(sssd_server, "/generate", body)
    assert response.status_code == 400
    assert message in response.text


def test_openai_clients_send_options_in_the_body(sssd_server):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "temperature": 0,
    }
    good = post(sssd_server, "/v1/chat/completions", body | {"custom_params": {"drafter": "none"}})
    assert good.is_success, good.text
    assert good.json()["usage"]["completion_tokens"] > 0
    bad = post(sssd_server, "/v1/chat/completions", body | {"custom_params": {"drafter": "x"}})
    assert bad.status_code == 400
    assert "custom_params.drafter" in bad.text


def test_prompt_longer_than_the_context_gets_a_400(sssd_server, prompts):
    body = {"input_ids": [5] * 100_000, "sampling_params": {"max_new_tokens": 4}}
    response = post(sssd_server, "/generate", body)
    assert response.status_code == 400
    assert answer(sssd_server, prompts[0])["output_ids"]


def test_aborted_requests_leave_the_others_alone(plain_server, sssd_server, prompts):
    expected = answer(plain_server, prompts[1])["output_ids"]

    def abandon() -> None:
        body = {
            "input_ids": prompts[0].input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True},
            "stream": True,
        }
        with HTTP.stream(
            "POST", sssd_server.base_url + "/generate", json=body, timeout=60
        ) as response:
            for _ in zip(range(3), lines(response), strict=False):
                pass

    threads = [threading.Thread(target=abandon) for _ in range(4)]
    for thread in threads:
        thread.start()
    got = answer(sssd_server, prompts[1])["output_ids"]
    for thread in threads:
        thread.join()
    assert got == expected
    eventually(lambda: running_requests(sssd_server) == 0, what="no aborted request runs on")


def running_requests(server: Server) -> float:
    """SGLang's own gauge."""
    metrics = HTTP.get(server.base_url + "/metrics", timeout=30).text
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("sglang:num_running_reqs{")
    ]
    assert values, "the gauge sglang:num_running_reqs is gone"
    return sum(values)


@pytest.fixture(scope="module")
def tight_server(prompts) -> Iterator[Server]:
    """A short context, and KV room for about half of what six requests come to need."""
    room = (sum(len(p.input_ids) for p in prompts[:6]) + 6 * 120) // 2 + 200
    flags = [*SSSD, "--budget", "fixed", "--disable-radix-cache", "--context-length", str(CONTEXT)]
    flags += ["--max-total-tokens", str(room), "--schedule-conservativeness", "0.05"]
    with Server(MODEL, flags, name="tight") as server:
        yield server


def test_retracted_requests_end_with_the_same_tokens(plain_server, tight_server, prompts):
    run = {"max_new_tokens": 120, "ignore_eos": True}
    jobs = [(prompt, run) for prompt in prompts[:6]]
    expected, got = answers(plain_server, jobs), answers(tight_server, jobs)
    assert [a["output_ids"] for a in got] == [a["output_ids"] for a in expected]
    assert "etract" in tight_server.log.read_text(), "nothing was retracted: this shows nothing"


@pytest.mark.parametrize("drafter", ["sssd", "none"])
def test_output_up_to_the_end_of_the_context(drafter, tight_server, prompts):
    ids = ([*prompts[0].input_ids] * CONTEXT)[: CONTEXT - 40]
    body = {
        "input_ids": ids,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 39,
            "ignore_eos": True,
            "custom_params": {"drafter": drafter},
        },
    }
    response = post(tight_server, "/generate", body)
    assert response.is_success, response.text
    meta = response.json()["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert 35 < meta["completion_tokens"] <= 39


def test_corpora_over_http(sssd_server, prompts):
    text = "The quick brown fox jumps over the lazy dog near the old stone bridge. " * 3
    added = post(
        sssd_server, "/add_external_corpus", {"corpus_id": "fox", "documents": [text, text]}
    )
    assert added.is_success, added.text
    assert added.json()["loaded_token_count"] > 50
    listed = HTTP.get(sssd_server.base_url + "/list_external_corpora", timeout=30).json()
    assert listed["corpus_token_counts"]["fox"] == added.json()["loaded_token_count"]
    removed = post(sssd_server, "/remove_external_corpus", {"corpus_id": "fox"})
    assert removed.is_success
    again = post(sssd_server, "/remove_external_corpus", {"corpus_id": "fox"})
    assert again.status_code == 400 and "fox" in again.text
    assert answer(sssd_server, prompts[0])["output_ids"]


def refused(server: Server) -> str:
    """What a server printed that must end by itself, with the exit code of a usage error."""
    server.start()
    try:
        eventually(lambda: server.exit_code() is not None, 120, "the server ends by itself")
    finally:
        code, log = server.exit_code(), server.tail(200)
        server.stop()
    assert code == 2, log
    return log


# (model, flags, what the message names)
WRONG: list[tuple[str, list[str], str]] = [
    ("smollm2-135m-instrukt", [], "smollm2-135m-instruct"),
    (MODEL, [*SSSD, "--datastore", "/nowhere/answers"], "/nowhere/answers"),
    (MODEL, [*SSSD, "--drafter", "eagle"], "unknown drafter 'eagle'"),
    (MODEL, [*SSSD, "--prefix-length", "0"], "--prefix-length='0'"),
    (MODEL, [*SSSD, "--speculative-num-draft-tokens", "900"], "expected 2 to 64"),
    (MODEL, ["--port", "99999"], "--port 99999"),
    (MODEL, [*SSSD, "--draft-model", "whisper-tiny.en"], "SpecASR needs a Whisper"),
    ("whisper-base", [*SSSD, "--draft-model", MODEL], "SpecASR needs a Whisper"),
    ("whisper-base", [*SSSD, "--draft-model", "whisper-tini.en"], "whisper-tiny.en"),
    ("whisper-base", [*SSSD, "--drafter", "specasr"], "--drafter specasr needs --draft-model"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What comes of the wrong command lines: exit codes, and what is printed."""
    folder = tmp_path_factory.mktemp("refused")
    logs = [folder / f"{number}.log" for number in range(len(WRONG))]
    lines = [
        json.dumps([str(log), serve_command(model, free_port(), flags)[FIRST_WORD:]])
        for log, (model, flags, _) in zip(logs, WRONG, strict=True)
    ]
    command = [sys.executable, "-m", "tests.server.refused_commands"]
    given = "\n".join(lines)
    env = os.environ | {FORK_SERVER_VARIABLE: "0"}  # no server will need one
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return list(zip(done.stdout.split(), [log.read_text() for log in logs], strict=True))


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[message for *_, message in WRONG])
def test_a_wrong_command_line_is_one_clear_line(number, refusals):
    code, log = refusals[number]
    assert code == "2", log
    errors = [line for line in log.splitlines() if "error:" in line]
    assert len(errors) == 1 and WRONG[number][2] in errors[0], log
    assert "Traceback" not in log


def test_a_port_in_use_is_one_clear_line(plain_server):
    log = refused(Server(MODEL, name="second", port=plain_server.port))
    assert f"port {plain_server.port} on 127.0.0.1 is in use" in log
    assert HTTP.get(plain_server.base_url + "/health", timeout=30).is_success
