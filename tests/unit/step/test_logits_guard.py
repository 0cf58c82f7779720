"""Rows of logits without a choice end their request, and only theirs."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.step.logits_guard import LogitsGuard
from sglang_ext.step.verify import accept_on_host
from sglang_ext.tree import TokenTree, pack
from tests.unit.step.test_verify import Multinomial, Sampling, tree

NAN, INF = float("nan"), float("inf")
SOUND = [0.0, 1.0, 2.0]
UNSOUND = {"NaN": [0.0, NAN, 1.0], "nothing": [-INF] * 3, "infinity": [0.0, INF, 1.0]}


class Sampler(torch.nn.Module):
    """SGLang's sampler in its simplest case; torch raises at what cannot be drawn from."""

    def forward(self, *args):
        return Multinomial(seed=0)(*args)


def request(name: str, chunks: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        rid=name, output_ids=[1], grammar=None, to_finish=None, inflight_middle_chunks=chunks
    )


def sample(rows, reqs, greedy=False):
    sampler = Sampler()
    guard = LogitsGuard(sampler)
    guard.reqs = reqs
    info = Sampling(torch.ones(len(rows), 1), greedy)
    return sampler(LogitsProcessorOutput(next_token_logits=torch.tensor(rows)), info)


@pytest.mark.parametrize("name", UNSOUND)
def test_such_a_row_ends_its_request_only(name, caplog):
    reqs = [request("a"), request("b"), request("c")]
    assert len(sample([SOUND, UNSOUND[name], SOUND], reqs)) == 3
    ended = [r.rid for r in reqs if r.to_finish is not None]
    assert ended == ["b"]
    assert reqs[1].to_finish.to_json()["status_code"] == 500
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "Request b" in caplog.text


@pytest.mark.parametrize("name", ["NaN", "nothing"])
def test_without_the_guard_the_sampler_raises(name):
    info = Sampling(torch.ones(1, 1))
    with pytest.raises(RuntimeError):
        Sampler()(LogitsProcessorOutput(next_token_logits=torch.tensor([UNSOUND[name]])), info)


def test_tokens_that_a_grammar_forbids_are_no_fault():
    reqs = [request("a")]
    assert sample([[-INF, 0.0, -INF]], reqs).tolist() == [1]
    assert reqs[0].to_finish is None


def test_a_prompt_that_is_not_read_to_its_end_goes_on():
    reqs = [request("a", chunks=1)]
    sample([UNSOUND["NaN"]], reqs)
    assert reqs[0].to_finish is None


def test_in_a_tree_the_row_is_traced_to_its_request():
    reqs = [request("a"), request("b")]
    packed = pack([0, 0], [TokenTree.empty(), tree([1], [-1])], 2)
    # The second request takes its first node, behind which there is no choice.
    logits = torch.tensor([SOUND, SOUND, [-INF, 5.0, -INF], UNSOUND["NaN"]])
    sampler = Sampler()
    LogitsGuard(sampler).reqs = reqs
    accepted = accept_on_host(logits, packed, Sampling(torch.ones(2, 1)), torch.arange(4), sampler)
    assert accepted.accept_lens.tolist() == [1, 2]
    assert [r.to_finish is not None for r in reqs] == [False, True]
