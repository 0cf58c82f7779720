"""Prefill and decode on servers of their own: real ones, KV by Mooncake over TCP."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from scripts.lib.client import Completion, generate, generate_all, stream
from scripts.lib.http_client import HTTP, lines
from scripts.lib.isolation_pd import HEADER, Routed, problems, rust_router
from scripts.lib.pd_servers import Disaggregated
from scripts.lib.served_metrics import read_metrics
from scripts.lib.spec_bench import Prompt
from tests.server.conftest import MODEL
from tests.server.servers import Server

try:
    import mooncake.engine  # noqa: F401
except ImportError as error:
    pytest.skip(f"Mooncake does not load here: {error}", allow_module_level=True)

# So small that requests which grow together do not fit, and some are retracted.
DECODE_POOL = 1100
FLAGS = [
    "--speculative-algorithm", "SSSD", "--enable-metrics", "--drafters", "random,ssbd",
    "--namespace-header", HEADER,
    f"--decode-flags=--max-total-tokens {DECODE_POOL} --num-reserved-decode-tokens 16",
]  # fmt: skip


# So short that even the KV of a short prompt has to be sent in parts.
QUEUE = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "32",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "1",
}


@pytest.fixture(scope="module")
def pd() -> Iterator[Disaggregated]:
    with Disaggregated(MODEL, FLAGS, name="pd-test", env=QUEUE) as servers:
        yield servers


def ids(answers: Sequence[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    "params",
    [
        {"drafter": "none"},
        {"budget": "fixed", "ingest": False},
        {"drafter": "random", "budget": "fixed"},
        {},
    ],
    ids=["plain", "all drafts", "random trees", "budget"],
)
def test_tokens_are_a_single_servers(
    pd: Disaggregated, plain_server: Server, prompts: list[Prompt], params: dict[str, Any]
) -> None:
    asked = [p.input_ids for p in prompts]
    expected = generate_all(plain_server.base_url, asked, in_flight=4, max_new_tokens=40)
    given = generate_all(pd.base_url, asked, in_flight=4, max_new_tokens=40, params=params or None)
    assert ids(given) == ids(expected)


def test_retracted_requests_come_back_with_the_same_tokens(
    pd: Disaggregated, plain_server: Server, prompts: list[Prompt]
) -> None:
    asked = [p.input_ids for p in prompts]
    run = {"in_flight": 8, "max_new_tokens": 160, "ignore_eos": True}
    expected = generate_all(plain_server.base_url, asked, **run)
    given = generate_all(pd.base_url, asked, params={"budget": "fixed"}, **run)
    assert ids(given) == ids(expected)
    assert "Retract requests" in pd.server_log("decode 1")


def test_drafters_are_ready_before_the_kv(pd: Disaggregated, prompts: list[Prompt]) -> None:
    before = read_metrics(pd.urls["decode 1"])
    generate_all(pd.base_url, [p.input_ids for p in prompts[:4]], max_new_tokens=4)
    after = read_metrics(pd.urls["decode 1"])
    for name, least in (("draft_lead_seconds_count", 4), ("draft_lead_seconds_sum", 0)):
        assert after[name] - before.get(name, 0) >= least
    assert after["draft_prefill_steps_total"] - before.get("draft_prefill_steps_total", 0) >= 4


def test_what_a_client_gets_wrong_is_refused_at_once(
    pd: Disaggregated, prompts: list[Prompt]
) -> None:
    answer = HTTP.post(
        pd.base_url + "/generate",
        json={
            "input_ids": list(prompts[0].input_ids),
            "sampling_params": {"custom_params": {"drafter": "nobody"}},
        },
        timeout=60,  # servers that wait for each other's part of a request do so for 300 s
    )
    assert answer.status_code == 400
    assert "custom_params.drafter" in answer.text


def test_streams_and_chat_go_through_the_router(
    pd: Disaggregated, plain_server: Server, prompts: list[Prompt]
) -> None:
    asked = prompts[1].input_ids
    expected = generate(plain_server.base_url, asked, max_new_tokens=24)
    assert stream(pd.base_url, asked, max_new_tokens=24).token_ids == expected.token_ids
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompts[1].text}],
        "temperature": 0,
        "max_tokens": 24,
        "custom_params": {"budget": "fixed"},
    }
    answers = [
        HTTP.post(url + "/v1/chat/completions", json=body, timeout=120).json()
        for url in (plain_server.base_url, pd.base_url)
    ]
    plain, apart = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert apart == plain


@pytest.mark.parametrize("name", ["mini", "rust"])
def test_tenants_are_apart_behind_both_routers(
    name: str, pd: Disaggregated, prompts: list[Prompt]
) -> None:
    asked = [p.input_ids for p in prompts[:3]]
    decode = pd.urls["decode 1"]
    if name == "mini":
        assert problems(Routed(name, pd.base_url, decode), asked) == []
    else:
        with rust_router(pd) as url:
            assert problems(Routed(name, url, decode), asked) == []


def test_aborted_requests_leave_room_for_others(
    pd: Disaggregated, plain_server: Server, prompts: list[Prompt]
) -> None:
    def leave(prompt: Prompt) -> None:
        """Ask for a long answer and hang up, before or amid it."""
        body = {
            "input_ids": list(prompt.input_ids),
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0},
            "stream": True,
        }
        try:
            with HTTP.stream("POST", pd.base_url + "/generate", json=body, timeout=1.0) as answer:
                next(lines(answer))
        except httpx.HTTPError:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, prompts))
    expected = generate(plain_server.base_url, prompts[0].input_ids, max_new_tokens=24)
    assert generate(pd.base_url, prompts[0].input_ids, max_new_tokens=24) is not None
    given = generate_all(pd.base_url, [prompts[0].input_ids] * 8, in_flight=8, max_new_tokens=24)
    assert ids(given) == [expected.token_ids] * 8


def test_a_killed_decode_server_is_started_again(
    pd: Disaggregated, plain_server: Server, prompts: list[Prompt]
) -> None:
    others = {name: pd.pid(name) for name in ("prefill 1", "router")}
    times = pd.ready_count("decode 1")
    pd.kill("decode 1")
    with pytest.raises(httpx.HTTPError):
        generate(pd.base_url, prompts[0].input_ids, max_new_tokens=4)
    pd.wait_until_ready_again("decode 1", times)
    expected = generate(plain_server.base_url, prompts[0].input_ids, max_new_tokens=24)
    given = generate(pd.base_url, prompts[0].input_ids, max_new_tokens=24)
    assert given.token_ids == expected.token_ids
    assert others == {name: pd.pid(name) for name in others}


def test_sigterm_ends_all_of_it(pd: Disaggregated) -> None:
    """The last one: its servers are gone behind it."""
    pids = [pd.pid(name) for name in ("prefill 1", "decode 1", "router")]
    family = [p for pid in pids for p in psutil.Process(pid).children(recursive=True)]
    pd.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
