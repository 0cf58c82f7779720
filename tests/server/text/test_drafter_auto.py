"""`--drafter auto` on a real server: lossless, told in answers and metrics, and it learns."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.lib.client import events
from scripts.lib.http_client import HTTP
from scripts.lib.server import Server
from scripts.lib.spec_bench import tokenizer
from tests.eventually import eventually
from tests.server.conftest import CHUNK, MODEL
from tests.server.text.test_equal_to_plain import answer, answers, told

NAMES = {"sssd", "specdec", "specdec+sssd"}


@pytest.fixture(scope="module")
def auto_server(block_drafter: Path) -> Iterator[Server]:
    flags = ["--speculative-algorithm", "SSSD", "--drafter", "auto", "--drafters", "ssbd"]
    flags += ["--draft-model", str(block_drafter), "--bigram-seconds", "0", "--enable-metrics"]
    with Server(MODEL, [*flags, *CHUNK], name="auto") as server:
        yield server


def chosen(made: list[Any]) -> Counter[str]:
    return Counter(each["meta_info"]["drafter"] for each in made)


def counted(server: Server) -> dict[str, float]:
    """Requests by the drafter that was chosen for them, of all that have ended."""
    page = HTTP.get(server.base_url + "/metrics", timeout=30).text
    return {
        sample.labels["drafter"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "sglang_ext:drafter_choices_total"
    }


def test_output_is_plain_sglangs_whatever_is_chosen(plain_server, auto_server, prompts):
    def told_of() -> dict[str, float]:
        # A step tells of those before it: of SGLang's own requests at the start, too.
        answer(auto_server, prompts[0], max_new_tokens=4, custom_params={"drafter": "none"})
        return counted(auto_server)

    before = told_of()
    jobs = [(prompt, {"max_new_tokens": 32}) for prompt in prompts]
    expected = answers(plain_server, jobs)
    got = answers(auto_server, jobs * 3)
    for prompt, made, wanted in zip(prompts * 3, got, expected * 3, strict=True):
        if told(made) != told(wanted):  # where two tokens tie, plain SGLang may as well
            again = answer(plain_server, prompt, max_new_tokens=32)
            assert told(again) != told(wanted) and told(made) == told(again)
    counts = chosen(got)
    assert set(counts) <= NAMES and len(counts) > 1

    def since() -> dict[str, float]:
        return {name: n - before.get(name, 0.0) for name, n in told_of().items()}

    assert eventually(lambda: sum(since().values()) >= len(got) and since())
    assert {name: since().get(name, 0) for name in counts} == counts


def test_what_pays_in_a_namespace_is_what_it_gets(auto_server, prompts):
    """The drafter says " the" for ever: a waste where that is never written.

    Where it is written nothing follows: SSSD finds it in what the request has written, too.
    """
    (the,) = tokenizer(MODEL)(" the")["input_ids"]

    def ask(namespace: str, rounds: int, **sampling: Any) -> Counter[str]:
        params = {"namespace": namespace, "ingest": False, "datastore": False}
        made = []
        for n in range(rounds):
            sampling |= {"max_new_tokens": 24, "custom_params": params}
            made.append(answer(auto_server, prompts[n % len(prompts)], **sampling))
        return chosen(made[rounds // 2 :])

    wrong = ask("other", 40, logit_bias={str(the): -100.0})
    assert wrong["sssd"] > 10


def test_requests_that_say_how_they_are_drafted_for_are_left_alone(auto_server, prompts):
    for params in (
        {"drafter": "ssbd", "ssbd": {"draft": [1, 2], "beta": 0.5}},
        {"relaxed": {"top_beta": 2}},
        {"drafter": "none"},
    ):
        got = answer(auto_server, prompts[0], max_new_tokens=4, custom_params=params)
        assert "drafter" not in got["meta_info"]


def test_ssbds_params_bias_nothing_without_its_drafter(plain_server, auto_server, prompts):
    params = {"ssbd": {"draft": [28, 28, 28, 28], "beta": 1.0}}
    wanted = answer(plain_server, prompts[1], max_new_tokens=16)
    for _ in range(6):
        got = answer(auto_server, prompts[1], max_new_tokens=16, custom_params=params)
        assert told(got) == told(wanted) and got["meta_info"]["drafter"] in NAMES


def test_a_stream_tells_it_in_its_last_part(auto_server, prompts):
    body = {
        "input_ids": prompts[2].input_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 24},
    }
    parts = [json.loads(part) for part in events(auto_server.base_url, body)]
    names = {part["meta_info"].get("drafter") for part in parts}
    assert len(parts) > 1 and len(names) == 1 and names <= NAMES


def test_auto_is_no_drafter_that_a_request_can_name(auto_server, prompts):
    sampling = {"custom_params": {"drafter": "auto"}}
    body = {"input_ids": prompts[0].input_ids, "sampling_params": sampling}
    response = HTTP.post(auto_server.base_url + "/generate", json=body, timeout=60)
    assert response.status_code == 400 and "custom_params.drafter" in response.text
