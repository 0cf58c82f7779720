"""A draft model in a process of its own: output stays plain SGLang's, whatever becomes of it."""

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from scripts.lib.http_client import HTTP
from scripts.lib.served_metrics import read_metrics
from scripts.lib.spec_bench import Prompt
from sglang_ext.mirror import lm_loading
from sglang_ext.mirror.streaming.stream_files import (
    StreamManifest,
    draft_fingerprint,
    write_streams,
)
from sglang_ext.mirror.streaming.stream_training import fresh_streams
from sglang_ext.models import resolve
from tests.eventually import eventually
from tests.server.conftest import CHUNK, MODEL
from tests.server.servers import Server

LENGTHS = [24, 40, 9, 32, 17, 40]


def answered(server: Server, prompts: Sequence[Prompt], params: dict | None = None) -> list[dict]:
    """Greedy answers to six prompts, three under way at a time."""

    def ask(job: tuple[Prompt, int]) -> dict:
        prompt, length = job
        sampling = {"temperature": 0, "max_new_tokens": length, "custom_params": params}
        response = HTTP.post(
            server.base_url + "/generate",
            json={"input_ids": prompt.input_ids, "sampling_params": sampling},
            timeout=300,
        )
        assert response.is_success, response.text
        return response.json()

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(ask, zip(prompts, LENGTHS, strict=False)))


@pytest.fixture(scope="module")
def expected(plain_server, prompts) -> list[list[int]]:
    return [a["output_ids"] for a in answered(plain_server, prompts)]


@pytest.fixture(scope="module")
def streams(tmp_path_factory) -> Path:
    """Streams of the draft model that were trained on nothing: what they see is nonsense."""
    folder, model = tmp_path_factory.mktemp("streams"), resolve(MODEL)
    draft = lm_loading.load(model, "fp32")
    made = StreamManifest(draft_fingerprint(model), MODEL, MODEL, 2, 4, draft.shape.layers)
    write_streams(folder, made, fresh_streams(draft, 2, 4, 0))
    return folder


@pytest.fixture(scope="module")
def mirror_server(streams) -> Iterator[Server]:
    """A model that is its own draft: what it drafts is nearly always right."""
    flags = ["--speculative-algorithm", "SSSD", "--drafter", "mirror", "--draft-model", MODEL]
    flags += ["--budget", "fixed", "--mirror-lens-seconds", "6", "--enable-metrics"]
    flags += ["--mirror-streams", str(streams)]
    with Server(MODEL, [*flags, *CHUNK], name="mirror") as server:
        yield server


def draft_processes(server: Server) -> list[psutil.Process]:
    """The draft executor's, its supervisor left out."""
    below = psutil.Process(server.pid).children(recursive=True)
    return [p for p in below if "sglang_ext.mirror.draft_process" in p.cmdline()[:3]]


def test_output_is_plain_and_drafts_are_accepted(expected, mirror_server, prompts):
    got = answered(mirror_server, prompts)
    assert [a["output_ids"] for a in got] == expected
    assert max(a["meta_info"]["spec_accept_length"] for a in got) > 2
    counted = read_metrics(mirror_server.base_url)
    assert counted["drafter.draft_steps"] > 0
    assert counted["drafter.outcomes"] >= counted["drafter.foreseen_top8"] > 0
    assert 0 < counted["early_exit_seconds_total"] < counted["before_exit_seconds_total"]


def test_output_is_plain_whatever_a_request_lets_the_draft_model_do(
    expected, mirror_server, prompts
):
    before = read_metrics(mirror_server.base_url)["early_exit_steps_total"]
    for asked in ({"exit": False}, {"exit": False, "retrieval": False, "streams": False}):
        got = answered(mirror_server, prompts, {"mirror": asked})
        assert [a["output_ids"] for a in got] == expected
    assert read_metrics(mirror_server.base_url)["early_exit_steps_total"] == before
    got = answered(mirror_server, prompts, {"mirror": {"kappa": 1, "retrieval": False}})
    assert [a["output_ids"] for a in got] == expected


def test_what_a_request_cannot_ask_for_is_a_400(mirror_server, prompts):
    sampling = {"max_new_tokens": 4, "custom_params": {"mirror": {"kappa": 0}}}
    response = HTTP.post(
        mirror_server.base_url + "/generate",
        json={"input_ids": prompts[0].input_ids, "sampling_params": sampling},
        timeout=60,
    )
    assert response.status_code == 400 and "mirror.kappa must be" in response.text


def test_output_is_plain_when_the_draft_process_is_killed(expected, mirror_server, prompts):
    [process] = draft_processes(mirror_server)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answered, mirror_server, prompts)
        process.send_signal(signal.SIGKILL)
        got = running.result()
    assert [a["output_ids"] for a in got] == expected
    assert eventually(lambda: draft_processes(mirror_server), 120)[0].pid != process.pid
    eventually(lambda: "draft executor is ready again" in mirror_server.output(), 120)
    again = answered(mirror_server, prompts)
    assert [a["output_ids"] for a in again] == expected
    assert mirror_server.output().count("decoding goes on without it") == 1
