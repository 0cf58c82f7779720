"""Relaxed acceptance on a real server: Eqs. 6 and 7 hold, all else is as it was, and is told."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from scripts.lib.client import events
from scripts.lib.http_client import HTTP
from scripts.lib.served_metrics import read_metrics
from scripts.lib.spec_bench import tokenizer
from tests.eventually import eventually
from tests.server.conftest import JSON_SCHEMA, MODEL
from tests.server.servers import Server
from tests.server.text.answers import answer

WIDEST = {"top_beta": 32, "tau": 10.0}
NARROW = {"top_beta": 3, "tau": 1.0}
TOKENS = 24
UNSEEN = {"drafter": "none", "ingest": False}


@pytest.fixture(scope="module")
def plain(sssd_server, prompts) -> list[list[int]]:
    """What plain decoding writes after four prompts."""
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "custom_params": UNSEEN}
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda prompt: answer(sssd_server, prompt, **sampling), prompts[:4])
        return [each["output_ids"] for each in made]


@pytest.fixture(scope="module")
def drafts(plain) -> list[list[int]]:
    """For each of the prompts a draft that a model could have written: another one's output."""
    return plain[1:] + plain[:1]


def params_of(draft: list[int], relaxed: dict | None) -> dict[str, Any]:
    ssbd = {"draft": draft, "beta": 0, "retrieve": False}
    params = {"drafter": "ssbd", "ingest": False, "ssbd": ssbd, "budget": "fixed"}
    return params if relaxed is None else params | {"relaxed": relaxed}


def relaxed_answer(server: Server, prompt, draft, relaxed, **sampling: Any):
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True} | sampling
    return answer(server, prompt, custom_params=params_of(draft, relaxed), **sampling)


def chances(server: Server, prompt, output) -> list[tuple[float, list[tuple[float, int]]]]:
    """For each output token its log-probability, and the 32 best by plain decoding."""
    body = {
        "input_ids": [*prompt.input_ids, *output],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "custom_params": UNSEEN},
        "return_logprob": True,
        "logprob_start_len": len(prompt.input_ids) - 1,
        "top_logprobs_num": 32,
    }
    meta = HTTP.post(server.base_url + "/generate", json=body, timeout=300).json()["meta_info"]
    own, top = meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]
    return [(o[0], [(p, t) for p, t, _ in best]) for o, best in zip(own, top, strict=True)]


@pytest.mark.parametrize("rule", [NARROW, WIDEST], ids=["narrow", "widest"])
def test_every_token_is_the_targets_own_or_passes_the_equations(
    rule, sssd_server, prompts, plain, drafts
):
    relaxed = steps = exact_steps = 0
    for prompt, draft, own in zip(prompts, drafts, plain, strict=False):
        made = relaxed_answer(sssd_server, prompt, draft, rule)
        exact = relaxed_answer(sssd_server, prompt, draft, None)
        assert exact["output_ids"] == own
        assert "relaxed_tokens" not in exact["meta_info"]
        marks, output = made["meta_info"]["relaxed_tokens"], made["output_ids"]
        assert len(marks) == len(output) == TOKENS
        scored = chances(sssd_server, prompt, output)
        for mark, token, (logprob, best) in zip(marks, output, scored, strict=True):
            if mark:
                assert token != best[0][1] and token in draft
                assert logprob >= best[rule["top_beta"] - 1][0] - 1e-3
                assert best[0][0] - logprob <= rule["tau"] + 1e-3
            else:
                assert logprob >= best[0][0] - 1e-3
        relaxed += sum(marks)
        steps += made["meta_info"]["spec_verify_ct"]
        exact_steps += exact["meta_info"]["spec_verify_ct"]
    assert relaxed, "nothing was relaxed: nothing was tested"
    assert steps < exact_steps


def test_requests_beside_relaxed_ones_keep_their_output(sssd_server, prompts, plain, drafts):
    jobs = [(i % 4, WIDEST if i % 2 else None) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(
                lambda job: relaxed_answer(sssd_server, prompts[job[0]], drafts[job[0]], job[1]),
                jobs,
            )
        )
    for (number, rule), got in zip(jobs, made, strict=True):
        if rule is None:
            assert got["output_ids"] == plain[number]
            assert "relaxed_tokens" not in got["meta_info"]
        else:
            assert len(got["meta_info"]["relaxed_tokens"]) == TOKENS


def test_grammar_penalties_and_forbidden_tokens_hold_for_relaxed_tokens(
    sssd_server, prompts, drafts
):
    text = tokenizer(MODEL).encode('{"city": "Rome", "people": 12}')
    made = relaxed_answer(
        sssd_server, prompts[0], text, WIDEST, json_schema=JSON_SCHEMA, ignore_eos=False,
        max_new_tokens=60,
    )  # fmt: skip
    if made["meta_info"]["finish_reason"]["type"] == "stop":
        assert set(json.loads(made["text"])) == {"city", "people"}
    assert made["text"].lstrip().startswith("{")
    draft = drafts[1]
    banned = {str(token): -1e4 for token in draft[:8]}
    made = relaxed_answer(sssd_server, prompts[1], draft, WIDEST, logit_bias=banned)
    assert not set(made["output_ids"]) & set(draft[:8])
    made = relaxed_answer(
        sssd_server, prompts[1], draft, WIDEST, repetition_penalty=1.3, frequency_penalty=0.4
    )
    assert len(made["meta_info"]["relaxed_tokens"]) == len(made["output_ids"])


def test_a_stream_logprobs_and_several_choices_tell_of_it(sssd_server, prompts, drafts):
    sampling = {
        "temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True,
        "custom_params": params_of(drafts[0], WIDEST),
    }  # fmt: skip
    body = {"input_ids": prompts[0].input_ids, "sampling_params": sampling}
    last = json.loads(list(events(sssd_server.base_url, body))[-1])
    assert len(last["meta_info"]["relaxed_tokens"]) == len(last["output_ids"]) == TOKENS
    assert sum(last["meta_info"]["relaxed_tokens"])
    scored = body | {"return_logprob": True, "top_logprobs_num": 1}
    made = HTTP.post(sssd_server.base_url + "/generate", json=scored, timeout=300).json()
    meta = made["meta_info"]
    logprobs = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    for mark, token, ((logprob, told, _), ((best, _, _), *_)) in zip(
        meta["relaxed_tokens"], made["output_ids"], logprobs, strict=True
    ):
        assert told == token
        assert logprob < best if mark else logprob == pytest.approx(best, abs=1e-4)
    several = {"input_ids": prompts[0].input_ids, "sampling_params": sampling | {"n": 2}}
    made = HTTP.post(sssd_server.base_url + "/generate", json=several, timeout=300).json()
    for choice in made:
        assert len(choice["meta_info"]["relaxed_tokens"]) == TOKENS


def test_metrics_count_relaxed_tokens(sssd_server, prompts, drafts):
    before = read_metrics(sssd_server.base_url)["relaxed_tokens_total"]
    made = relaxed_answer(sssd_server, prompts[2], drafts[2], WIDEST)
    wanted = before + sum(made["meta_info"]["relaxed_tokens"])
    assert wanted > before
    eventually(lambda: read_metrics(sssd_server.base_url)["relaxed_tokens_total"] >= wanted)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"custom_params": {"relaxed": {"top_beta": 0}}}, "relaxed.top_beta must be"),
        ({"custom_params": {"relaxed": {"tau": -1}}}, "relaxed.tau must be"),
        ({"custom_params": {"relaxed": "yes"}}, "relaxed must be an object"),
        ({"custom_params": {"relaxed": {"by": "drafter"}}}, "relaxed.by must be target"),
        ({"custom_params": {"relaxed": {}}, "temperature": 0.7}, "temperature must be 0"),
    ],
)
def test_what_cannot_be_relaxed_is_a_400(sampling, message, sssd_server):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 4,
        "temperature": 0,
    } | sampling
    response = HTTP.post(sssd_server.base_url + "/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400 and message in response.text, response.text
