"""Weights, K and V in fewer bits on a real server, its layers fused: speculation stays exact."""

from collections.abc import Iterator

import pytest

from scripts.lib.served_metrics import read_metrics
from tests.server.conftest import CHUNK, MODEL
from tests.server.servers import Server
from tests.server.text.answers import answer, answers, told


@pytest.fixture(scope="module")
def int4_server() -> Iterator[Server]:
    flags = ["--speculative-algorithm", "SSSD", "--bigram-seconds", "0"]
    bits = ["--cpu-weights", "int4", "--enable-metrics"]
    # An early exit between the fused layers, which asks a head whose weight is gone.
    bits += ["--mirror-retrieval", "1", "--mirror-lens-seconds", "6"]
    with Server(MODEL, [*flags, *bits, *CHUNK], name="int4") as server:
        yield server


def test_speculative_output_is_plain_output(int4_server, prompts):
    log = int4_server.log.read_text()
    assert "30 decoder layers are fused" in log
    assert "KV Cache is allocated. dtype: torch.bfloat16" in log
    asked = prompts[:8]
    plain = [answer(int4_server, prompt, custom_params={"drafter": "none"}) for prompt in asked]
    assert len({tuple(each["output_ids"]) for each in plain}) == len(asked)
    for budget in ("auto", "fixed"):  # the second time the datastore has all of the outputs
        drafted = answers(int4_server, [(p, {"custom_params": {"budget": budget}}) for p in asked])
        assert [told(each) for each in drafted] == [told(each) for each in plain]
    steps = sum(each["meta_info"]["spec_verify_ct"] for each in drafted)
    assert read_metrics(int4_server.base_url)["early_exit_steps_total"] > 0
    assert steps < 0.5 * sum(each["meta_info"]["completion_tokens"] for each in drafted)
