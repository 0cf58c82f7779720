"""Re-translation on a real server: exact without a bias, Formula 5 with one, sessions apart."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.lib.client import generate, generate_all
from scripts.lib.http_client import HTTP
from scripts.lib.isolation_server import cross_session_changes
from tests.server.conftest import MODEL
from tests.server.servers import Server

SENTENCES = (
    "A man in an orange hat is looking at something behind the old stone wall.",
    "Five people in winter jackets stand in the snow and wait for the bus to the city.",
    "Two dogs run over the green field while a child with a red ball calls them back.",
)
LAG = 4
TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from sglang_ext.models import resolve

    return AutoTokenizer.from_pretrained(str(resolve(MODEL)))


def prompts_of(tokenizer, sentence: str) -> list[list[int]]:
    """The prompts of a source that grows by LAG words."""
    words = sentence.split()
    ends = [*range(LAG, len(words), LAG), len(words)]
    return [
        tokenizer.encode(
            f"<|im_start|>user\nSay this in other words: {' '.join(words[:end])}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        for end in ends
    ]


@pytest.fixture(scope="module")
def streams(tokenizer) -> list[list[list[int]]]:
    return [prompts_of(tokenizer, sentence) for sentence in SENTENCES]


def ask(server: Server, prompt, *, sampling=None, **ssbd):
    params = {"drafter": "ssbd", "ingest": False, "ssbd": ssbd}
    made = generate(
        server.base_url, prompt, params=params, max_new_tokens=TOKENS, **(sampling or {})
    )
    return made.token_ids


def retranslate(server: Server, prompts, name: str, **ssbd) -> list[list[int]]:
    """Each step's output; the session is the server's memory of the one before."""
    return [ask(server, prompt, session=name, **ssbd) for prompt in prompts]


@pytest.fixture(scope="module")
def plain(plain_server, streams) -> list[list[list[int]]]:
    asked = [prompt for prompts in streams for prompt in prompts]
    made = iter(generate_all(plain_server.base_url, asked, in_flight=8, max_new_tokens=TOKENS))
    return [[next(made).token_ids for _ in prompts] for prompts in streams]


@pytest.mark.parametrize(
    "options", [{}, {"realign": False, "retrieve": False}, {"trim": 3}], ids=str
)
def test_without_a_bias_tokens_are_plain_decodings(options, sssd_server, streams, plain):
    for number, (prompts, expected) in enumerate(zip(streams, plain, strict=True)):
        name = f"exact-{number}-{options}"
        assert retranslate(sssd_server, prompts, name, beta=0, **options) == expected


def test_streams_side_by_side_without_a_bias(sssd_server, streams, plain):
    with ThreadPoolExecutor(6) as pool:
        made = pool.map(
            lambda job: retranslate(sssd_server, job[1], f"beside-{job[0]}", beta=0),
            enumerate(streams * 2),
        )
        assert list(made) == plain * 2


def distributions(server: Server, prompt, output) -> Iterator[tuple[float, int, float]]:
    """For each output token: its probability, the likeliest token and that one's."""
    body = {
        "input_ids": [*prompt, *output],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        "top_logprobs_num": 1,
    }
    meta = HTTP.post(server.base_url + "/generate", json=body, timeout=300).json()["meta_info"]
    own = meta["input_token_logprobs"][1:]
    top = meta["input_top_logprobs"][1:]
    for (logprob, _, _), ((best, token, _), *_) in zip(own, top, strict=True):
        yield math.exp(logprob), token, math.exp(best)


@pytest.mark.parametrize("beta", [0.1, 0.3])
def test_every_token_follows_formula_5(beta, plain_server, sssd_server, streams, plain):
    kept = 0
    for prompts, old in zip(streams, plain, strict=True):
        draft = [token for token in old[0] if token != 2]
        made = ask(sssd_server, prompts[-1], draft=draft, beta=beta)
        agreed = True
        scored = distributions(plain_server, prompts[-1], made)
        for place, (token, (prob, best, best_prob)) in enumerate(zip(made, scored, strict=True)):
            if not agreed or place >= len(draft):
                assert token == best
            elif token == draft[place]:
                assert (1 - beta) * prob + beta >= (1 - beta) * best_prob - 1e-4
                kept += token != best
            else:
                # The draft's token lost, by the same formula.
                assert token == best
                replaced = next(
                    p
                    for i, (p, _, _) in enumerate(
                        distributions(plain_server, prompts[-1], draft[: place + 1])
                    )
                    if i == place
                )
                assert (1 - beta) * replaced + beta < (1 - beta) * best_prob + 1e-4
                agreed = False
    assert kept, "no token was kept against the target's first choice: nothing was tested"


def test_a_full_bias_keeps_the_draft(sssd_server, streams, plain):
    draft = plain[1][-1][:12]
    made = ask(sssd_server, streams[0][-1], draft=draft, beta=1)
    assert made[:12] == draft


def test_width_and_logprobs_do_not_change_a_biased_output(sssd_server, streams, plain):
    draft, prompt = plain[0][0][:-1], streams[0][-1]
    expected = ask(sssd_server, prompt, draft=draft, beta=0.3)
    for params in ({"draft_length": 1}, {"draft_length": 0}, {"budget": "auto"}):
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": TOKENS,
                "custom_params": {
                    "drafter": "ssbd", "ingest": False, "ssbd": {"draft": draft, "beta": 0.3},
                    **params,
                },
            },
            "return_logprob": True,
        }  # fmt: skip
        answer = HTTP.post(sssd_server.base_url + "/generate", json=body, timeout=300).json()
        assert answer["output_ids"] == expected, params
        tokens = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
        assert tokens == expected


def test_sampled_outputs_follow_the_mixture(sssd_server, streams, plain):
    def sampled(beta: float) -> list[int]:
        sampling = {"temperature": 0.9}
        return ask(sssd_server, streams[2][-1], sampling=sampling, draft=plain[2][0], beta=beta)

    assert len({tuple(sampled(0.3)) for _ in range(3)}) == 3
    first = [sampled(0.95)[0] for _ in range(40)]
    # 95% at least; fewer than three quarters would be seen three times in a million runs.
    assert first.count(plain[2][0][0]) >= 30


def test_sessions_of_chat_completions_are_apart_by_namespace(sssd_server):
    def accepted(session: str, namespace: str) -> int:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Name three rivers of France."}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "return_meta_info": True,
            "custom_params": {
                "drafter": "ssbd", "namespace": namespace, "ingest": False,
                "ssbd": {"session": session, "retrieve": False},
            },
        }  # fmt: skip
        response = HTTP.post(sssd_server.base_url + "/v1/chat/completions", json=body, timeout=300)
        assert response.is_success, response.text
        return response.json()["choices"][0]["message"]["content"]

    def verified() -> float:
        metrics = HTTP.get(sssd_server.base_url + "/metrics", timeout=60).text
        (value,) = [
            line.split()[-1]
            for line in metrics.splitlines()
            if line.startswith("sglang_ext:drafter{") and "drafted_sessions" in line
        ]
        return float(value)

    text = accepted("rivers", "a")
    before = verified()
    assert accepted("rivers", "b") == text  # another tenant: nothing is known
    assert accepted("lakes", "a") == text
    assert verified() == before
    assert accepted("rivers", "a") == text
    assert verified() == before + 1


def test_what_another_client_wrote_to_a_guessed_session_changes_no_answer(sssd_server, prompts):
    asked = [p.input_ids for p in prompts[:2]]
    assert cross_session_changes(sssd_server.base_url, asked) == 0


@pytest.mark.parametrize(
    ("ssbd", "message"),
    [
        ({"beta": 2}, "custom_params.ssbd.beta must be a number from 0 to 1"),
        ({"draft": "text"}, "custom_params.ssbd.draft must be a list"),
        ({"sesion": "x"}, "is unknown"),
        ({"session": "talk-7", "beta": 0.2}, "custom_params.ssbd.beta must be 0 or left out"),
    ],
)
def test_wrong_options_get_a_400(ssbd, message, sssd_server, streams):
    params = {"drafter": "ssbd", "ssbd": ssbd}
    body = {"input_ids": streams[0][0], "sampling_params": {"custom_params": params}}
    response = HTTP.post(sssd_server.base_url + "/generate", json=body, timeout=60)
    assert response.status_code == 400
    assert message in response.text


def test_drafts_that_are_no_text_of_this_model_only_cost_time(sssd_server, streams, plain):
    for draft in ([10**9, 5, 6], [5, 10**12]):
        assert ask(sssd_server, streams[0][-1], draft=draft, beta=0) == plain[0][-1]
        assert ask(sssd_server, streams[0][-1], draft=draft, beta=0.01)


def test_a_request_that_writes_nothing_with_a_draft(sssd_server, streams, plain):
    params = {"drafter": "ssbd", "ssbd": {"draft": plain[0][0]}}
    sampling = {"max_new_tokens": 0, "temperature": 0, "custom_params": params}
    body = {"input_ids": streams[0][0], "sampling_params": sampling}
    response = HTTP.post(sssd_server.base_url + "/generate", json=body, timeout=60)
    assert response.is_success and response.json()["meta_info"]["completion_tokens"] == 0
    assert ask(sssd_server, streams[0][0], draft=plain[0][0], beta=0) == plain[0][0]
