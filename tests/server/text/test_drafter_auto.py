"""`--drafter auto` on a real server: lossless, told in answers and metrics, and it learns.

Its block drafter's encoder is the target: the states that it gets, too.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoConfig

from scripts.lib.client import events
from scripts.lib.http_client import HTTP
from scripts.lib.served_metrics import read_metrics
from scripts.lib.spec_bench import tokenizer
from sglang_ext.block_drafter.drafter_files import load_drafter, save_drafter
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.state_log import read_records
from sglang_ext.block_drafter.states_on_disk import StatesAt
from sglang_ext.block_drafter.target_states import StatesReader
from sglang_ext.models import resolve
from tests.eventually import eventually
from tests.server.conftest import CHUNK, MODEL
from tests.server.servers import Server
from tests.server.text.answers import answer, answers, told

NAMES = {"sssd", "specdec", "specdec+sssd"}
MOST = 64  # source tokens of the drafter
LAYER = 20  # whose states it reads
BLOCKS = {
    "drafter": "specdec", "specdec": {"retrieve": False}, "draft_length": 6, "ingest": False,
    "budget": "fixed",
}  # fmt: skip


@pytest.fixture(scope="module")
def shared_encoder(block_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`block_drafter`, which leans to frequent tokens, with the target as its encoder."""
    own, made = load_drafter(block_drafter), tmp_path_factory.mktemp("shared-encoder")
    states = TargetStates(LAYER, AutoConfig.from_pretrained(resolve(MODEL)).hidden_size)
    torch.manual_seed(0)
    shape = own.manifest.shape
    model = BlockModel(shape, own.kept.num_rows, own.kept.num_classes, states=states)
    model.output_bias.data = own.model.output_bias.data
    save_drafter(made, replace(own.manifest, states=states), model, own.kept)
    return made


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's drafter `recorder` writes states to."""
    return tmp_path_factory.mktemp("recorded") / "states"


@pytest.fixture(scope="module")
def auto_server(shared_encoder: Path, recorded: Path) -> Iterator[Server]:
    flags = ["--speculative-algorithm", "SSSD", "--drafter", "auto", "--drafters", "ssbd,recorder"]
    flags += ["--record-states", str(recorded), "--record-layer", str(LAYER)]
    flags += ["--draft-model", str(shared_encoder), "--bigram-seconds", "0", "--enable-metrics"]
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

    sampling = {
        "max_new_tokens": 24, "logit_bias": {str(the): -100.0},
        "custom_params": {"namespace": "other", "ingest": False, "datastore": False},
    }  # fmt: skip
    jobs = [(prompts[n % len(prompts)], sampling) for n in range(20)]
    answers(auto_server, jobs)  # what it learns by
    assert chosen(answers(auto_server, jobs))["sssd"] > 10


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
def sources(auto_server: Server, prompts) -> Sources:
    # A step tells of those before it: of SGLang's own requests at the start, too.
    answer(auto_server, prompts[0], max_new_tokens=4, custom_params={"drafter": "none"})
    return Sources(auto_server)


def test_greedy_output_is_plain_sglangs_and_states_are_of_whole_sources(
    plain_server, auto_server, sources, prompts
):
    expected = answers(plain_server, [(prompt, {"max_new_tokens": 24}) for prompt in prompts])
    jobs = [(prompt, {"max_new_tokens": 24, "custom_params": BLOCKS}) for prompt in prompts]
    wanted_tokens = sum(min(MOST, len(prompt.input_ids)) for prompt in prompts)
    for _ in range(2):  # the second time the radix cache has the prompts
        got = answers(auto_server, jobs)
        for prompt, made, wanted in zip(prompts, got, expected, strict=True):
            if told(made) != told(wanted):  # where two tokens tie, plain SGLang may as well
                again = answer(plain_server, prompt, max_new_tokens=24)
                assert told(again) != told(wanted) and told(made) == told(again)
        assert sources.since(len(prompts)) == wanted_tokens


def test_what_an_answer_wrote_has_states_in_the_next_turn(
    plain_server, auto_server, sources, prompts
):
    first = prompts[3]
    written = answer(auto_server, first, max_new_tokens=20, custom_params=BLOCKS)["output_ids"]
    sources.since(1)
    turn = [*first.input_ids, *written, *prompts[4].input_ids[:12]]
    sampling = {"temperature": 0, "max_new_tokens": 12}

    def ask(server: Server, **more) -> list[int]:
        body = {"input_ids": turn, "sampling_params": sampling | more}
        response = HTTP.post(server.base_url + "/generate", json=body, timeout=300)
        assert response.is_success, response.text
        return response.json()["output_ids"]

    assert ask(auto_server, custom_params=BLOCKS) == ask(plain_server)
    # What it had written, verify steps had read; the radix cache has all but the last token.
    assert sources.since(1) == MOST


def test_states_are_recorded_as_the_target_reads_them(plain_server, auto_server, recorded, prompts):
    asked, sampling = prompts[5:8], {"max_new_tokens": 16}
    jobs = [
        (prompt, {**sampling, "custom_params": {
            "drafter": "recorder", "recorder": {"number": n, "begin": 3}, "ingest": False,
        }})
        for n, prompt in enumerate(asked)
    ]  # fmt: skip
    got = answers(auto_server, jobs)
    expected = answers(plain_server, [(prompt, sampling) for prompt in asked])
    assert list(map(told, got)) == list(map(told, expected))

    def all_of_them() -> dict[int, StatesAt]:
        found = read_records(recorded)
        places = {} if found is None else found.places
        return places if len(places) == len(asked) else {}

    places = eventually(all_of_them)
    texts = [
        np.array([*prompt.input_ids, *made["output_ids"][:-1]], np.int32)
        for prompt, made in zip(asked, got, strict=True)
    ]
    read = StatesReader(MODEL, LAYER).read(texts, [slice(3, len(text)) for text in texts])
    for number, wanted in enumerate(read):
        at = places[number]
        rows = np.fromfile(at.path, np.float16).reshape(-1, wanted.shape[1])
        found = torch.from_numpy(rows[at.first : at.first + at.count].astype(np.float32))
        assert at.begin == 3 and found.shape == wanted.shape
        assert torch.cosine_similarity(found, wanted.float()).min() > 0.99


def test_a_source_of_its_own_is_a_400(auto_server, prompts):
    sampling = {"custom_params": {"specdec": {"source": "A man"}}}
    body = {"input_ids": prompts[0].input_ids, "sampling_params": sampling}
    response = HTTP.post(auto_server.base_url + "/generate", json=body, timeout=60)
    assert response.status_code == 400 and "must be left out" in response.text
