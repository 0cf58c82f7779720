"""A verify step in a graph is planned from the host's lengths, as FlashInfer plans it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts.emulation.attention_bench import Graph, Requests, verify_batch, verify_error
from scripts.emulation.flashinfer_bench import bench
from scripts.emulation.flashinfer_wrappers import BatchPrefillWithPagedKVCacheWrapper
from scripts.emulation.verify_cases import Step
from sglang_ext.cuda import flashinfer_plan

WIDTH, GRAPH_BATCH = 8, 4


@pytest.fixture
def made():
    torch.manual_seed(0)
    with bench() as bench_made:
        flashinfer_plan.install(bench_made.backend)
        yield bench_made


def waits(*args, **kwargs):
    pytest.fail("FlashInfer's own plan, which waits for the device")


def stored(made, lens):
    step = Step.random(np.random.default_rng(len(lens)), lens, WIDTH)
    requests = Requests.stored(made, step.lens, WIDTH)
    return step, requests, verify_batch(requests, step)


def test_every_replay_is_planned_from_lengths_and_right(made, monkeypatch):
    graph = Graph(made, GRAPH_BATCH, WIDTH)
    for name in ("plan", "begin_forward"):
        monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, name, waits)
    for lens in ([37, 5, 70], [9], [80, 80, 1, 2]):
        step, requests, batch = stored(made, lens)
        graph.replay(batch)
        assert verify_error(made, requests, step, batch, GRAPH_BATCH * WIDTH) < 1e-5


def test_lengths_that_are_not_the_batchs_are_refused(made):
    Graph(made, GRAPH_BATCH, WIDTH)
    _, _, batch = stored(made, [37, 5, 70, 12])
    batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    with pytest.raises(ValueError, match="packed masks start at"):
        made.backend.init_forward_metadata_out_graph(batch)


def test_without_the_hosts_lengths_the_first_plan_stays(made):
    made.backend.init_cuda_graph_state(GRAPH_BATCH, GRAPH_BATCH * WIDTH)
    step, requests, batch = stored(made, [37, 5, 70, 12])
    batch.seq_lens_cpu = None
    batch.positions = torch.zeros(GRAPH_BATCH * WIDTH, dtype=torch.int64)
    made.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    [wrapper] = made.backend.prefill_cuda_graph_metadata[GRAPH_BATCH]
    assert wrapper.begin_forward.__func__ is type(wrapper).begin_forward
    assert verify_error(made, requests, step, batch, GRAPH_BATCH * WIDTH) < 1e-5


def test_installing_twice_is_installing_once(made):
    planned = made.backend.init_forward_metadata_out_graph
    flashinfer_plan.install(made.backend)
    assert made.backend.init_forward_metadata_out_graph is planned


@pytest.mark.parametrize("kind", [{"window": 32}, {"encoder_decoder": True}])
def test_what_has_several_wrappers_keeps_its_own_plan(kind):
    with bench(**kind) as other:
        before = other.backend.init_forward_metadata_out_graph
        flashinfer_plan.install(other.backend)
        assert other.backend.init_forward_metadata_out_graph == before


def test_another_backend_is_left_alone():
    other = SimpleNamespace()
    flashinfer_plan.install(other)
    assert not vars(other)
