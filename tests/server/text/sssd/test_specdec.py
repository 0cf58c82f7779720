"""The drafter `specdec` on a real server: output is plain SGLang's, whatever the drafter says."""

import pytest

from scripts.lib.http_client import HTTP
from scripts.lib.served_metrics import read_metrics
from scripts.lib.spec_bench import Prompt, tokenizer
from tests.eventually import eventually
from tests.server.conftest import MODEL
from tests.server.servers import Server
from tests.server.text.answers import answer, answers, told

PARAMS = {
    "a tree with branches": {"specdec": {"retrieve": False}, "draft_length": 6},
    "one tree with SSSD": {"draft_length": 10},
    "a source of its own": {"specdec": {"source": "A man in a blue shirt."}, "draft_length": 4},
}


@pytest.fixture(scope="module")
def expected(plain_server: Server, prompts: list[Prompt]):
    return answers(plain_server, [(prompt, {"max_new_tokens": 32}) for prompt in prompts])


def totals(server: Server) -> dict[str, float]:
    """The drafters' own totals by name."""
    begin, series = "drafter.", read_metrics(server.base_url)
    return {n.removeprefix(begin): v for n, v in series.items() if n.startswith(begin)}


@pytest.mark.parametrize("kind", PARAMS)
def test_greedy_output_of_a_batch(kind, expected, plain_server, sssd_server, prompts):
    before = totals(sssd_server)
    params = {"drafter": "specdec", **PARAMS[kind]}
    jobs = [(prompt, {"max_new_tokens": 32, "custom_params": params}) for prompt in prompts]
    for prompt, got, wanted in zip(prompts, answers(sssd_server, jobs), expected, strict=True):
        if told(got) != told(wanted):  # where two tokens tie, plain SGLang may as well
            again = answer(plain_server, prompt, max_new_tokens=32)
            assert told(again) != told(wanted) and told(got) == told(again)
    sources = before.get("sources", 0) + len(prompts)

    def reported() -> dict[str, float]:
        found = totals(sssd_server)
        return found if found.get("sources", 0) >= sources else {}

    after = eventually(reported)
    passes = after["passes"] - before.get("passes", 0)
    blocks = after["blocks"] - before.get("blocks", 0)
    assert blocks > passes > 0, "one pass drafts for several requests"


def test_a_block_that_is_right_is_accepted_whole(plain_server, sssd_server, prompts):
    """Six tokens drafted in one pass and the target's own: seven a step."""
    (the,) = tokenizer(MODEL)(" the")["input_ids"]
    sampling = {"max_new_tokens": 43, "logit_bias": {str(the): 100.0}}
    params = {"drafter": "specdec", "specdec": {"retrieve": False, "branches": 1}}
    got = answer(sssd_server, prompts[0], custom_params=params, **sampling)
    assert got["output_ids"] == [the] * 43
    assert got["output_ids"] == answer(plain_server, prompts[0], **sampling)["output_ids"]
    assert got["meta_info"]["spec_accept_length"] > 5


@pytest.mark.parametrize(
    ("given", "said"),
    [({"source": 3}, "specdec.source must be a text"), ({"x": 1}, "'x' is unknown")],
)
def test_bad_params_are_a_400(given, said, sssd_server, prompts):
    sampling = {"custom_params": {"drafter": "specdec", "specdec": given}}
    body = {"input_ids": prompts[0].input_ids, "sampling_params": sampling}
    response = HTTP.post(sssd_server.base_url + "/generate", json=body, timeout=60)
    assert response.status_code == 400 and said in response.text
