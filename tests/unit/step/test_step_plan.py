"""Plans as arrays, and what the other tensor-parallel ranks make of them."""

import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.drafters import Bias
from sglang_ext.step.bias import Expected
from sglang_ext.step.step_plan import StepPlan, array_size, share, share_flag
from sglang_ext.tree import TokenTree, pack


def plan_of(width: int, biased: bool, scored: bool = False) -> StepPlan:
    rng = np.random.default_rng(width)
    trees = []
    for nodes in (width - 1, 0, (width - 1) // 2):
        parents = np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int32)
        tokens = rng.integers(0, 1 << 40, nodes)
        logprobs = -rng.random(nodes, dtype=np.float32) if scored else None
        probs = np.ones(nodes, dtype=np.float32)
        trees.append(TokenTree(tokens, parents, probs, logprobs=logprobs))
    packed = pack([7, 8, 9], trees, width)
    biases = [Bias([5, 6], 0.2), None, Bias([1 << 40], 1 / 3)] if biased else [None] * 3
    return StepPlan(packed, Expected.of_trees(biases, trees, packed))


def assert_equal(a: StepPlan, b: StepPlan) -> None:
    for name, value in vars(a.packed).items():
        other = getattr(b.packed, name)
        np.testing.assert_array_equal(value, other, err_msg=name)
        assert (value is None) == (other is None)
        assert value is None or value.dtype == other.dtype, name
    assert (a.expected is None) == (b.expected is None)
    if a.expected is not None and b.expected is not None:
        np.testing.assert_array_equal(a.expected.tokens, b.expected.tokens)
        np.testing.assert_array_equal(a.expected.betas, b.expected.betas)


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [1, 2, 8])
def test_a_plan_comes_back_from_its_array(width, biased, scored):
    plan = plan_of(width, biased, scored)
    assert (plan.packed.logprobs is not None) == scored
    array = plan.to_array()
    assert array.shape == (array_size(3, width, biased, scored),)
    assert_equal(plan, StepPlan.from_array(array, 3, width, biased, scored))


def rank(number: int, address: str, told) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{address}", rank=number, world_size=2
    )
    group = SimpleNamespace(ranks=[0, 1], cpu_group=torch.distributed.group.WORLD)
    plans = [plan_of(width, flag, flag) for width in (1, 8) for flag in (False, True)]
    flags = [share_flag(number == 0 and flag, group) for flag in (True, False)]
    shared = [share(plan if number == 0 else None, 3, group) for plan in plans]
    for plan, got in zip(plans, shared, strict=True):
        assert_equal(plan, got)
    told.put((number, flags, len(shared)))
    # At the process's end its threads may still run, which aborts it.
    torch.distributed.destroy_process_group()


def test_ranks_get_rank_0s_plans_and_flags(tmp_path):
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    ranks = [context.Process(target=rank, args=(n, str(tmp_path / "at"), told)) for n in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        assert process.exitcode == 0
    assert sorted(told.get() for _ in ranks) == [(n, [True, False], 4) for n in (0, 1)]
