"""States of prompts by KV slot: who has them, and when they are gone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from torch import nn

from sglang_ext.block_drafter.target_states import even_states
from sglang_ext.drafters import DrafterError
from sglang_ext.step import sequence_states
from sglang_ext.step.sequence_states import KeptStates, states_for

WIDTH, SLOTS = 8, 32


class Layer(nn.Module):
    def forward(self, hidden):
        return hidden + 1.0


class Model(nn.Module):
    """Three layers, a norm and a head, where SGLang's models have them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))


class Target:
    def __init__(self):
        config = SimpleNamespace(num_hidden_layers=3, vocab_size=4, hidden_size=WIDTH)
        self.model = Model()
        self.model_runner = SimpleNamespace(model=self.model, model_config=config)
        self.rows = SimpleNamespace(req_to_token=torch.zeros(4, 16, dtype=torch.int32))
        self.allocator = SimpleNamespace(size=SLOTS, page_size=1)

    def get_memory_pool(self):
        return self.rows, self.allocator


def request(row: int) -> Req:
    made = Req("r", "", [1, 2, 3], SamplingParams())
    made.kv.req_pool_idx = row
    return made


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(sequence_states, "_why_not", lambda: "")
    target = Target()
    return target, KeptStates(target, 2)


def read(target, kept, slots, hidden):
    batch = SimpleNamespace(out_cache_loc=torch.tensor(slots))
    with kept.reading(batch):
        target.model(hidden)


def test_a_request_has_the_states_of_what_was_read_into_its_slots(server):
    target, kept = server
    hidden = torch.randn(5, WIDTH)
    read(target, kept, [7, 3, 9, 20, 4], hidden)
    target.rows.req_to_token[2, :4] = torch.tensor([3, 9, 20, 31])
    found = kept.reader(request(2))(0, 4)
    assert found.places.tolist() == [0, 1, 2]  # nobody has read slot 31
    assert torch.equal(found.states, even_states(hidden[1:4] + 2.0))
    part = kept.reader(request(2))(1, 3)
    assert torch.equal(part.states, found.states[1:]) and part.places.tolist() == [0, 1]
    assert kept.take_seconds() > 0 and kept.take_seconds() == 0


def test_states_are_moved_as_their_slots_are(server):
    target, kept = server
    hidden = torch.randn(3, WIDTH)
    read(target, kept, [5, 6, 7], hidden)
    kept.forget(torch.tensor([7]))
    kept.move(torch.tensor([5, 6]), torch.tensor([6, 7]))
    target.rows.req_to_token[1, :3] = torch.tensor([5, 6, 7])
    found = kept.reader(request(1))(0, 3)
    assert found.places.tolist() == [0]
    assert torch.equal(found.states, even_states(hidden[1:2] + 2.0))


def test_slots_that_are_written_otherwise_have_none(server):
    target, kept = server
    target.rows.req_to_token[1, :3] = torch.tensor([5, 6, 7])
    read(target, kept, [5, 6, 7], torch.randn(3, WIDTH))
    kept.forget(torch.tensor([6]))
    target.model(torch.randn(3, WIDTH))  # a pass that reads no prompt
    assert kept.reader(request(1))(0, 3).places.tolist() == [0, 2]


def test_a_pass_with_padding_leaves_nothing(server):
    target, kept = server
    target.rows.req_to_token[0, :3] = torch.tensor([5, 6, 7])
    read(target, kept, [5, 6, 7], torch.randn(3, WIDTH))
    read(target, kept, [5, 6], torch.randn(4, WIDTH))
    assert kept.reader(request(0))(0, 3).places.tolist() == [2]


def test_drafts_behind_prompts_have_slots_of_their_own(server):
    target, kept = server
    batch = SimpleNamespace(out_cache_loc=torch.tensor([1, 2]))
    hidden = torch.randn(3, WIDTH)
    with kept.reading(batch):
        batch.out_cache_loc = torch.tensor([1, 2, 30])
        target.model(hidden)
    target.rows.req_to_token[0, :2] = torch.tensor([1, 2])
    found = kept.reader(request(0))(0, 2)
    assert torch.equal(found.states, even_states(hidden[:2] + 2.0))


def test_only_drafters_that_read_states_have_them_kept(server, monkeypatch):
    target, _ = server
    layers = [SimpleNamespace(states_layer=n) for n in (0, 2, 2, 1)]
    assert states_for(target, layers[:1]) is None
    assert states_for(target, layers[:3]) is not None
    with pytest.raises(DrafterError, match=r"different layers: \[1, 2\]"):
        states_for(target, layers)
    with pytest.raises(DrafterError, match="cannot be served: an exit lies behind"):
        states_for(target, [SimpleNamespace(states_layer=3)])
    monkeypatch.setattr(sequence_states, "_why_not", lambda: "on decode servers")
    with pytest.raises(DrafterError, match="not served on decode servers"):
        states_for(target, layers[1:2])


def test_states_come_as_a_drafter_takes_them(server):
    target, kept = server
    read(target, kept, [1, 2], torch.randn(2, WIDTH))
    target.rows.req_to_token[0, :2] = torch.tensor([1, 2])
    found = kept.reader(request(0))(0, 2)
    assert np.isfinite(found.states.numpy()).all() and found.states.dtype == torch.float16


def test_what_goes_wrong_costs_the_states_and_not_the_pass(server, caplog):
    target, kept = server
    target.rows.req_to_token[0, :2] = torch.tensor([1, 2])
    read(target, kept, [1, 2], torch.randn(2, WIDTH))
    read(target, kept, [3, SLOTS + 9], torch.randn(2, WIDTH))  # no such slot
    assert "not kept any more" in caplog.text
    read(target, kept, [1, 2], torch.randn(2, WIDTH))
    assert not len(kept.reader(request(0))(0, 2).places)
