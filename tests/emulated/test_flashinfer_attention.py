"""Verify steps through SGLang's real FlashInfer backend equal dense attention."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts.emulation.attention_bench import Graph, Requests, verify_batch, verify_error
from scripts.emulation.flashinfer_bench import bench
from scripts.emulation.flashinfer_checks import attention_errors, window_error
from scripts.emulation.verify_cases import Step
from sglang_ext.cuda import encoder_tokens

LENS, WIDTH, ENCODER = [37, 5, 70], 8, [50, 20, 33]
GRAPH_BATCH = 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def step():
    return Step.random(np.random.default_rng(0), LENS, WIDTH)


def test_every_case_equals_dense_attention():
    errors = attention_errors()
    assert max(errors.values()) < 1e-5
    for width in (2, 4, 8, 16, 32):
        for batch in (1, 8):
            for way in ("eager", "graph"):
                assert f"verify, width {width}, batch {batch}, {way}, self" in errors
                case = f"encoder-decoder verify, width {width}, batch {batch}, {way}, cross"
                assert case in errors


@pytest.mark.parametrize("graph", [False, True])
def test_a_verify_step_past_a_sliding_window_is_wrong(graph):
    assert window_error(32, graph) > 0.1


def test_a_window_longer_than_every_request_changes_nothing():
    assert window_error(200) < 1e-5


def errors_of(step, encoder_lens=(), graph=False, change=None, prepare=encoder_tokens.install):
    """The errors of self-attention and, beside an encoder, of cross-attention."""
    with bench(encoder_decoder=bool(encoder_lens)) as made:
        if encoder_lens:
            prepare(made.backend)
        requests = Requests.stored(made, step.lens, step.width, encoder_lens)
        batch = verify_batch(requests, step)
        if change is not None:
            change(batch)
        if graph:
            Graph(made, GRAPH_BATCH, step.width, 60 if encoder_lens else 0).replay(batch)
        else:
            made.backend.init_forward_metadata(batch)
        rows = (GRAPH_BATCH if graph else len(step.lens)) * step.width
        kinds = (False, True) if encoder_lens else (False,)
        return [verify_error(made, requests, step, batch, rows, cross) for cross in kinds]


@pytest.mark.parametrize("graph", [False, True])
def test_one_wrong_bit_of_the_mask_is_seen(step, graph):
    def flip(batch):
        mask = batch.spec_info.custom_mask
        mask[3 * (LENS[0] + WIDTH) + LENS[0]] ^= True  # node 3 of request 0 and the root

    assert errors_of(step, graph=graph)[0] < 1e-5
    assert errors_of(step, graph=graph, change=flip)[0] > 1e-3


@pytest.mark.parametrize("graph", [False, True])
def test_without_our_planning_sglang_is_wrong_beside_an_encoder(step, graph):
    own = errors_of(step, ENCODER, graph, prepare=lambda backend: None)
    assert min(own) > 0.1
    assert max(errors_of(step, ENCODER, graph)) < 1e-5


class Counted(torch.Tensor):
    """Lengths on a device, which tells when the host reads a sum of them."""

    reads = 0

    def __int__(self):
        Counted.reads += 1
        return super().__int__()


def test_the_hosts_encoder_lengths_spare_a_read_of_the_devices(step):
    def on_device(batch):
        batch.encoder_lens = batch.encoder_lens.as_subclass(Counted)

    def without_mirror(batch):
        on_device(batch)
        del batch.spec_info.encoder_lens_cpu

    Counted.reads = 0
    assert max(errors_of(step, ENCODER, change=on_device)) < 1e-5
    assert Counted.reads == 0
    assert max(errors_of(step, ENCODER, change=without_mirror)) < 1e-5
    assert Counted.reads == 1


def test_a_graph_without_the_hosts_encoder_lengths_is_right_too(step):
    def without_mirror(batch):
        del batch.spec_info.encoder_lens_cpu

    assert max(errors_of(step, ENCODER, graph=True, change=without_mirror)) < 1e-5


def test_lanes_behind_the_last_request_read_one_encoder_token_whatever_stands_there():
    lens, total = encoder_tokens._lens_and_sum(
        torch.tensor([50, 20, 700, 1500], dtype=torch.int32),
        SimpleNamespace(encoder_lens_cpu=[50, 20]),
    )
    assert lens.tolist() == [50, 20, 1, 1] and total == 72


def test_installing_twice_is_installing_once():
    with bench(encoder_decoder=True) as made:
        encoder_tokens.install(made.backend)
        update = made.backend.indices_updater_prefill.update
        make = made.backend._create_prefill_wrappers
        encoder_tokens.install(made.backend)
        assert made.backend.indices_updater_prefill.update is update
        assert made.backend._create_prefill_wrappers is make


def test_a_backend_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="needs --attention-backend flashinfer, not SimpleName"):
        encoder_tokens.install(SimpleNamespace())
    with bench() as made, pytest.raises(ValueError, match="not made for an encoder-decoder model"):
        encoder_tokens.install(made.backend)
