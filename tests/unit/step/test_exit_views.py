"""What drafters are told of an early exit: whose rows, which nodes, and when."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.drafters import Drafter, DrafterContext
from sglang_ext.mirror.early_exit import Look
from sglang_ext.options import Options
from sglang_ext.step.asking import AskedDrafter
from sglang_ext.step.exit_views import ExitViews
from sglang_ext.step.step_plan import Step, StepPlan
from sglang_ext.tree import TokenTree, pack

KAPPA = 2


class Exit:
    """An exit whose candidates behind a pass's row r are 10 r and 10 r + 1."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []

    @contextmanager
    def watching(self, rows: Any, total: int, told: Any) -> Iterator[None]:
        self.asked.append((rows.tolist(), total))
        yield Look(3.5, 0.25)
        candidates = (10 * rows[:, None] + np.arange(KAPPA)).astype(np.int32)
        told(candidates, -candidates.astype(np.float32))


class Told(Drafter):
    def __init__(self, context=None):
        self.told: list[tuple[list[str], Any]] = []

    def propose(self, requests, max_nodes):
        return [TokenTree.empty()] * len(requests)

    def early_exit(self, requests, view):
        self.told.append(([r.rid for r in requests], view))


class Deaf(Told):
    """Has the hook, and no use for it now."""

    uses_early_exit = False  # type: ignore[assignment]


def asked(drafter: Drafter) -> AskedDrafter:
    return AskedDrafter("theirs", drafter)


TREES = [
    TokenTree.chain([5]),
    TokenTree(np.array([6, 7, 8]), np.array([-1, -1, 1], np.int32), np.ones(3, np.float32)),
    TokenTree.empty(),
    TokenTree.chain([9, 9]),
]


def step_of(drafters: list[AskedDrafter | None], trees=TREES, width: int = 5) -> Step:
    running = [
        SimpleNamespace(drafter=drafter, draft=SimpleNamespace(rid=f"r{b}"))
        for b, drafter in enumerate(drafters)
    ]
    packed = pack([1, 2, 3, 4][: len(trees)], trees, width)
    return Step(None, running=running, plan=StepPlan(packed, None), started=3.0)  # type: ignore


@pytest.mark.parametrize(
    ("ragged", "rows", "total"),
    [(True, [0, 1, 7, 8, 9, 2, 3, 4, 5], 10), (False, [0, 1, 15, 16, 17, 5, 6, 7, 8], 20)],
)
def test_each_drafter_is_told_of_its_requests_real_nodes(ragged, rows, total):
    one, other, exit = asked(Told()), asked(Told()), Exit()
    step = step_of([one, other, None, one])
    with ExitViews(exit).watching(step, ragged):  # type: ignore[arg-type]
        assert not one.drafter.told  # type: ignore[attr-defined]
    assert exit.asked == [(rows, total)]
    [(rids, view)] = one.drafter.told  # type: ignore[attr-defined]
    assert rids == ["r0", "r3"] == list(view.rids) and view.started == 3.0
    assert view.counts.tolist() == [2, 3] and view.tokens.shape == (2, 3)
    assert view.tokens.tolist() == [[1, 5, 0], [4, 9, 9]]
    assert view.parents.tolist() == [[-1, 0, -1], [-1, 0, 1]]
    firsts = view.candidates[:, :, 0]
    assert firsts[0, :2].tolist() == [10 * r for r in rows[:2]]
    assert firsts[1].tolist() == [10 * r for r in rows[2:5]]
    assert np.isneginf(view.logprobs[0, 2]).all() and np.isfinite(view.logprobs[1]).all()
    dtypes = [a.dtype for a in (view.tokens, view.parents, view.counts, view.candidates)]
    assert dtypes == [np.int32] * 4 and view.logprobs.dtype == np.float32
    [(rids, view)] = other.drafter.told  # type: ignore[attr-defined]
    assert rids == ["r1"] and view.parents.tolist() == [[-1, 0, 0, 2]]
    assert view.candidates[0, :, 0].tolist() == [10 * r for r in rows[5:]]


def test_in_a_plain_step_the_roots_are_told_of():
    one, exit = asked(Told()), Exit()
    with ExitViews(exit).watching(step_of([one, one], [TokenTree.empty()] * 2, 1), False):
        pass
    [(_, view)] = one.drafter.told
    assert view.tokens.tolist() == [[1], [2]] and view.counts.tolist() == [1, 1]


def test_nothing_is_computed_where_no_request_asks_for_it():
    exit = Exit()
    deaf = asked(Deaf())
    with ExitViews(exit).watching(step_of([deaf, None, deaf, None]), True):
        pass
    assert exit.asked == [] and not deaf.uses_exit


def test_a_drafter_chooses_the_requests_whose_exits_it_is_told_of():
    class Choosing(Told):
        def wants_early_exit(self, request):
            if request.rid == "r3":
                raise ValueError("which?")
            return request.rid == "r1"

    drafter, exit = asked(Choosing()), Exit()
    with ExitViews(exit).watching(step_of([drafter] * 4), True) as look:
        pass
    [(rids, _)] = drafter.drafter.told  # type: ignore[attr-defined]
    assert rids == ["r1"] and exit.asked == [([2, 3, 4, 5], 10)] and look.reached_at == 3.5
    with ExitViews(exit).watching(step_of([drafter], TREES[:1], 2), True) as look:
        pass
    assert len(exit.asked) == 1 and look.reached_at is None


def test_a_drafter_that_raises_costs_its_call_alone(caplog):
    class Failing(Told):
        def early_exit(self, requests, view):
            raise RuntimeError("no thread")

    failing, well = asked(Failing()), asked(Told())
    with ExitViews(Exit()).watching(step_of([failing, well, well, failing]), True):
        pass
    assert len(well.drafter.told) == 1 and "failed in early_exit" in caplog.text


def test_only_drafters_with_the_hook_use_the_exit():
    class Least(Drafter):
        def propose(self, requests, max_nodes):
            return []

    context = DrafterContext(vocab_size=10, options=Options())
    Least(context).early_exit([], None)  # does nothing
    assert [asked(d).uses_exit for d in (Least(context), Told(), Deaf())] == [False, True, False]
