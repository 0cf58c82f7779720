"""Whatever a request asks for, greedy output with speculation is plain SGLang's."""

import json
import re
from itertools import islice
from typing import Any

import pytest

from scripts.lib.http_client import HTTP, lines
from scripts.lib.served_metrics import read_metrics
from scripts.lib.spec_bench import Prompt, tokenizer
from tests.eventually import eventually
from tests.server.conftest import CHUNK, JSON_SCHEMA, MODEL
from tests.server.servers import Server
from tests.server.text.answers import answer, answers, told

# custom_params; a CPU computes each node that is verified, so that random trees are small here.
DRAFTERS = {"sssd": {"drafter": "sssd"}, "random": {"drafter": "random", "draft_length": 6}}


CASES: dict[str, dict[str, Any]] = {
    "to the end": {"max_new_tokens": 120},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "seven tokens": {"max_new_tokens": 7},
    "no eos": {"ignore_eos": True},
    "stop string": {"stop": [" the", ". "]},
    "stop regex": {"stop_regex": "[a-z]+ing"},
    "stop token": {"stop_token_ids": [30, 28]},
    "min new tokens": {"min_new_tokens": 40, "stop_token_ids": [30, 28, 253]},
    "frequency penalty": {"frequency_penalty": 0.8},
    "presence penalty": {"presence_penalty": 1.2},
    "repetition penalty": {"repetition_penalty": 1.3},
    "all penalties": {
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.1,
        "min_new_tokens": 20,
    },
    "logit bias": {"logit_bias": {"260": 3.0, "253": -5.0}},
    "regex": {"regex": r"(yes|no|perhaps)( and (yes|no)){3}"},
    "json schema": {"json_schema": JSON_SCHEMA},
}


def cases_answered(server: Server, prompts: list[Prompt], **params: Any) -> dict[str, list[Any]]:
    """The answers to three prompts in every case, cases mixed in one batch."""
    asked = [(prompt, case | params) for case in CASES.values() for prompt in prompts[:3]]
    got = iter(answers(server, asked))
    return {name: list(islice(got, 3)) for name in CASES}


@pytest.fixture(scope="module")
def expected_of_cases(plain_server, prompts) -> dict[str, list[Any]]:
    return cases_answered(plain_server, prompts)


@pytest.fixture(scope="module", params=DRAFTERS)
def drafted_cases(request, sssd_server, prompts) -> dict[str, list[Any]]:
    return cases_answered(sssd_server, prompts, custom_params=DRAFTERS[request.param])


@pytest.mark.parametrize("case", CASES)
def test_greedy_output(case, drafted_cases, expected_of_cases, plain_server, prompts):
    pairs = list(zip(prompts, drafted_cases[case], expected_of_cases[case], strict=False))
    for prompt, got, expected in pairs:
        if told(got) != told(expected):  # where two tokens tie, plain SGLang may as well
            again = answer(plain_server, prompt, **CASES[case])
            assert told(again) != told(expected) and told(got) == told(again)


def joining_and_leaving(server: Server, prompts: list[Prompt], **extra: Any) -> list[list[int]]:
    """Outputs of requests of many lengths, eight of them at a time."""
    lengths = [5 + 9 * (i % 7) for i in range(20)]
    jobs = [
        (prompts[i % len(prompts)], {"max_new_tokens": length} | extra)
        for i, length in enumerate(lengths)
    ]
    return [answered["output_ids"] for answered in answers(server, jobs)]


@pytest.fixture(scope="module")
def expected_of_joining(plain_server, prompts) -> list[list[int]]:
    return joining_and_leaving(plain_server, prompts)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_join_and_leave_the_batch(
    drafter, expected_of_joining, plain_server, sssd_server, prompts
):
    got = joining_and_leaving(sssd_server, prompts, custom_params=DRAFTERS[drafter])
    expected = dict(enumerate(expected_of_joining))
    if got != expected_of_joining:  # where two tokens tie, plain SGLang may contradict itself
        again = joining_and_leaving(plain_server, prompts)
        expected = {i: ids for i, ids in expected.items() if ids == again[i]}
        assert len(expected) > len(again) // 2
    assert {i: got[i] for i in expected} == expected


def test_mixed_drafters_in_one_batch(plain_server, sssd_server, prompts):
    choices = ["sssd", "random", "none"]
    params = [{"drafter": choices[i % 3], "draft_length": 1 + 3 * i} for i in range(6)]
    got = answers(sssd_server, [(prompts[i], {"custom_params": params[i]}) for i in range(6)])
    expected = answers(plain_server, [(prompt, {}) for prompt in prompts[:6]])
    assert [a["output_ids"] for a in got] == [a["output_ids"] for a in expected]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_logprobs(drafter, plain_server, sssd_server, prompts):
    body = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 260]}
    expected = answer(plain_server, prompts[0], body)["meta_info"]
    got = answer(sssd_server, prompts[0], body, custom_params=DRAFTERS[drafter])["meta_info"]
    for key in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        assert len(got[key]) == len(expected[key])
        for a, b in zip(flat(got[key]), flat(expected[key]), strict=True):
            assert a[1] == b[1]
            assert a[0] == pytest.approx(b[0], abs=2e-3)


def flat(entries: list) -> list:
    """[(logprob, token, text), ...] of a list of those or of lists of those."""
    if entries and isinstance(entries[0][0], list):
        return [item for entry in entries for item in entry]
    return entries


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chunked_prefill_and_radix_hits(drafter, plain_server, sssd_server, prompts):
    long = Prompt("long", "", tuple(t for p in prompts for t in p.input_ids)[:700])
    longer = Prompt("longer", "", (*long.input_ids, *prompts[0].input_ids))
    assert len(long.input_ids) > 2 * int(CHUNK[1])
    params = {"custom_params": DRAFTERS[drafter]}
    for prompt in (long, longer, long):
        expected = answer(plain_server, prompt)
        got = answer(sssd_server, prompt, **params)
        assert got["output_ids"] == expected["output_ids"]
    assert got["meta_info"]["cached_tokens"] > 0


def test_several_samples_of_one_prompt(plain_server, sssd_server, prompts):
    expected = answer(plain_server, prompts[1])["output_ids"]
    answers = answer(sssd_server, prompts[1], n=3)
    assert [a["output_ids"] for a in answers] == [expected] * 3


def test_streaming_adds_up_to_the_whole(sssd_server, prompts):
    whole = answer(sssd_server, prompts[2])
    with HTTP.stream(
        "POST",
        sssd_server.base_url + "/generate",
        json={
            "input_ids": prompts[2].input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 48},
            "stream": True,
        },
        timeout=300,
    ) as response:
        chunks = [json.loads(line[6:]) for line in lines(response) if line.startswith(b"data: {")]
    assert chunks[-1]["text"] == whole["text"]
    lengths = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert lengths == sorted(lengths) and lengths[-1] == whole["meta_info"]["completion_tokens"]


def served_until_drafted(server: Server, prompt: Prompt, **sampling: Any):
    """The answer to a prompt, asked for until most of it is drafted from what was served."""
    for _ in range(40):  # live ingest takes a moment
        served = answer(server, prompt, ignore_eos=True, **sampling)
        if served["meta_info"]["spec_accept_length"] > 3:
            break
    return served


def test_repeated_prompts_are_drafted_from_what_was_served(sssd_server, prompts):
    first = answer(sssd_server, prompts[3], max_new_tokens=64, ignore_eos=True)
    again = served_until_drafted(sssd_server, prompts[3], max_new_tokens=64)
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["spec_accept_length"] > 3


def test_what_was_never_seen_is_drafted_from_the_targets_bigrams(
    plain_server, sssd_server, prompts
):
    def counted(series: str) -> float:
        text = HTTP.get(sssd_server.base_url + "/metrics", timeout=30).text
        found = re.findall(rf'^sglang_ext:{series}\{{.*source="bigram".*\}} (\S+)$', text, re.M)
        return sum(map(float, found))

    proposed, accepted = counted("proposed_tokens_total"), counted("accepted_tokens_total")
    own_tokens = {"custom_params": {"drafter": "sssd", "datastore": False}}
    got = answers(sssd_server, [(prompt, own_tokens) for prompt in prompts[:4]])
    expected = answers(plain_server, [(prompt, {}) for prompt in prompts[:4]])
    assert [a["output_ids"] for a in got] == [a["output_ids"] for a in expected]
    assert counted("proposed_tokens_total") > proposed
    assert counted("accepted_tokens_total") > accepted


def test_a_stop_string_behind_the_end_of_an_answer_is_not_looked_for(
    plain_server, sssd_server, prompts
):
    """SGLang looks for stop strings in all tokens of a step before it looks for its end."""
    ids = served_until_drafted(sssd_server, prompts[4], max_new_tokens=48)["output_ids"]
    decode = tokenizer(MODEL).decode
    ends = []
    for end in range(4, len(ids) - 2):
        stop = decode(ids[end + 1 : end + 2])
        if ids[end] not in ids[:end] and stop not in decode(ids[: end + 1]):
            ends.append((end, stop))
    assert len(ends) >= 5
    jobs = [
        (prompts[4], {"stop_token_ids": [ids[end]], "stop": [stop], "no_stop_trim": True})
        for end, stop in ends
    ]
    expected, got = answers(plain_server, jobs), answers(sssd_server, jobs)
    for (end, _), ours, plain in zip(ends, got, expected, strict=True):
        assert plain["output_ids"] == ids[: end + 1]
        assert ours["output_ids"] == plain["output_ids"]
        assert ours["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


def test_drafts_were_ready_when_their_passes_ended(plain_server, sssd_server, prompts):
    """Those of the likely outcomes, retrieved in the second half of a pass (mirror/)."""
    # From its own tokens alone, so that a text takes many steps however often it is asked for.
    alone = {"ignore_eos": True, "custom_params": {"datastore": False, "ingest": False}}
    expected = answers(plain_server, [(prompt, {"ignore_eos": True}) for prompt in prompts[:4]])
    before = read_metrics(sssd_server.base_url)

    def grown(name: str) -> bool:
        return read_metrics(sssd_server.base_url)[f"drafter.{name}"] > before[f"drafter.{name}"]

    def some_were_ready() -> bool:
        got = answers(sssd_server, [(prompt, alone) for prompt in prompts[:4]])
        assert [a["output_ids"] for a in got] == [a["output_ids"] for a in expected]
        return grown("mirror_hits")

    eventually(some_were_ready, 120, "a draft was ready when it was asked for")
    assert grown("mirror_prepared")
