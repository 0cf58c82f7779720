"""A block drafter whose encoder is the target, on a real server: the states it gets, and output."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from scripts.lib.http_client import HTTP
from scripts.lib.served_metrics import read_metrics
from scripts.lib.server import Server
from sglang_ext.block_drafter.drafter_files import load_drafter, save_drafter
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.models import resolve
from tests.eventually import eventually
from tests.server.conftest import CHUNK, MODEL
from tests.server.text.test_equal_to_plain import answer, answers, told

MOST = 64  # source tokens of the drafter
PARAMS = {"drafter": "specdec", "specdec": {"retrieve": False}, "draft_length": 6, "ingest": False}


@pytest.fixture(scope="module")
def shared_server(
    block_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a drafter that is not trained and leans to frequent tokens."""
    own, made = load_drafter(block_drafter), tmp_path_factory.mktemp("shared-encoder")
    states = TargetStates(20, AutoConfig.from_pretrained(resolve(MODEL)).hidden_size)
    torch.manual_seed(0)
    shape = own.manifest.shape
    model = BlockModel(shape, own.kept.num_rows, own.kept.num_classes, states=states)
    model.output_bias.data = own.model.output_bias.data
    save_drafter(made, replace(own.manifest, states=states), model, own.kept)
    flags = ["--speculative-algorithm", "SSSD", "--budget", "fixed", "--draft-model", str(made)]
    flags += ["--bigram-seconds", "0", "--enable-metrics"]
    with Server(MODEL, [*flags, *CHUNK], name="shared encoder") as server:
        yield server


class Sources:
    """Sources that a server's drafter has read since the last time that it was asked."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before: tuple[float, ...] = self._told()

    def _told(self) -> tuple[float, ...]:
        series = read_metrics(self._server.base_url)
        return series.get("drafter.sources", 0.0), series.get("drafter.source_tokens", 0.0)

    def since(self, requests: int) -> int:
        """The tokens of so many sources, once they are all there."""

        def told() -> tuple[float, ...]:
            now = self._told()
            return now if now[0] >= self._before[0] + requests else ()

        after = eventually(told)
        assert after[0] == self._before[0] + requests
        tokens, self._before = after[1] - self._before[1], after
        return int(tokens)


@pytest.fixture(scope="module")
def sources(shared_server: Server, prompts) -> Sources:
    # A step tells of those before it: of SGLang's own requests at the start, too.
    answer(shared_server, prompts[0], max_new_tokens=4, custom_params={"drafter": "none"})
    return Sources(shared_server)


def test_greedy_output_is_plain_sglangs_and_states_are_of_whole_sources(
    plain_server, shared_server, sources, prompts
):
    expected = answers(plain_server, [(prompt, {"max_new_tokens": 24}) for prompt in prompts])
    jobs = [(prompt, {"max_new_tokens": 24, "custom_params": PARAMS}) for prompt in prompts]
    wanted_tokens = sum(min(MOST, len(prompt.input_ids)) for prompt in prompts)
    for _ in range(2):  # the second time the radix cache has the prompts
        got = answers(shared_server, jobs)
        for prompt, made, wanted in zip(prompts, got, expected, strict=True):
            if told(made) != told(wanted):  # where two tokens tie, plain SGLang may as well
                again = answer(plain_server, prompt, max_new_tokens=24)
                assert told(again) != told(wanted) and told(made) == told(again)
        assert sources.since(len(prompts)) == wanted_tokens


def test_what_an_answer_wrote_has_no_states_in_the_next_turn(
    plain_server, shared_server, sources, prompts
):
    first = prompts[3]
    written = answer(shared_server, first, max_new_tokens=20, custom_params=PARAMS)["output_ids"]
    sources.since(1)
    turn = [*first.input_ids, *written, *prompts[4].input_ids[:12]]
    sampling = {"temperature": 0, "max_new_tokens": 12}

    def ask(server: Server, **more) -> list[int]:
        body = {"input_ids": turn, "sampling_params": sampling | more}
        response = HTTP.post(server.base_url + "/generate", json=body, timeout=300)
        assert response.is_success, response.text
        return response.json()["output_ids"]

    assert ask(shared_server, custom_params=PARAMS) == ask(plain_server)
    # What it had written was computed by decode steps; the rest was read, now or before.
    assert MOST - len(written) <= sources.since(1) < MOST


def test_a_source_of_its_own_is_a_400(shared_server, prompts):
    sampling = {"custom_params": {"specdec": {"source": "A man"}}}
    body = {"input_ids": prompts[0].input_ids, "sampling_params": sampling}
    response = HTTP.post(shared_server.base_url + "/generate", json=body, timeout=60)
    assert response.status_code == 400 and "must be left out" in response.text
