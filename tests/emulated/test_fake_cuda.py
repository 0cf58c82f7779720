"""The device path over fake CUDA tensors: no mixed devices, no hidden waits, few copies."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.emulation.fake_cuda import STEPS, Watch, watched


@pytest.mark.parametrize("name", STEPS)
def test_a_step_mixes_no_devices_and_waits_for_nothing(name):
    watch = watched(name)
    assert not +watch.mixes and not +watch.waits
    assert watch.calls > 5


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("blind", 0),
        ("plain", 1),
        ("verify, sampled", 1),
        ("verify, greedy, biased", 1),
        ("verify, greedy, relaxed", 1),
        ("verify, penalized", 2),
    ],
)
def test_a_steps_arrays_go_in_one_copy_and_penalties_in_another(name, copies):
    assert watched(name).copies == copies


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("waits", lambda x: x.sum().item()),
        ("waits", torch.nonzero),
        ("waits", lambda x: x[x > 0]),
        ("mixes", lambda x: x[torch.zeros(2, dtype=torch.int64)]),
        ("mixes", lambda x: torch.tensor([1.0, 2.0]).to(x.device)),
        ("mixes", lambda x: x.cpu()),
    ],
)
def test_what_should_not_be_there_is_noticed(kind, wrong):
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=_symbols()):
        x = torch.zeros(4, device="cuda")
        with Watch() as watch:
            wrong(x)
    assert getattr(watch, kind).total() > 0


def _symbols():
    """What gives sizes and values that only a device knows a name."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
