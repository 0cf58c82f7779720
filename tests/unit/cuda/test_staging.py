"""One copy for a step's arrays, and the mask that backends read."""

import numpy as np
import pytest
import torch

from sglang_ext.cuda.staging import full_mask, mask_starts, to_device
from sglang_ext.cuda.widths import default_widths


def test_arrays_of_all_kinds_come_through_one_buffer():
    arrays = [
        np.arange(5),
        np.array([[True, False, True]]),
        np.array([0.25, -1.5, 3.0], dtype=np.float32),
        np.empty((0, 4), dtype=np.int64),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
    ]
    made = to_device(arrays, "cpu")
    for array, tensor in zip(arrays, made, strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    assert len({t.untyped_storage().data_ptr() for t in made}) == 1


def test_what_is_written_to_an_array_later_does_not_reach_the_device():
    array = np.zeros(3)
    [tensor] = to_device([array], "cpu")
    array[:] = 1.0
    assert tensor.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("width", [2, 3, 16])
def test_each_node_sees_its_prefix_and_its_part_of_the_tree(width):
    rng = np.random.default_rng(width)
    lens = rng.integers(0, 60, 5)
    tree = torch.from_numpy(rng.random((5, width, width)) < 0.5)
    total = int(width * (lens.sum() + 5 * width))
    starts = torch.from_numpy(mask_starts(lens, width))
    rows = [
        torch.cat([torch.ones(width, int(n), dtype=torch.bool), part], dim=1).flatten()
        for n, part in zip(lens, tree, strict=True)
    ]
    made = full_mask(tree, torch.from_numpy(lens), starts, total)
    assert torch.equal(made, torch.cat(rows))


@pytest.mark.parametrize(
    ("most", "widths"), [(2, (1, 2)), (5, (1, 2, 4, 5)), (16, (1, 2, 4, 8, 16))]
)
def test_widths_are_powers_of_two_up_to_the_widest(most, widths):
    assert default_widths(most) == widths
