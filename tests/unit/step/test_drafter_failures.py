"""What a drafter's exceptions cost: one call, and never that it drafts from a wrong state."""

import logging
from functools import partial

import numpy as np
import pytest

from sglang_ext.drafters import Bias, Drafter
from sglang_ext.request_options import RequestOptions
from sglang_ext.tree import TokenTree, pack
from tests.unit.step.test_planner import Recorder, arriving, planner, request

TEXT = list(range(5, 25))


class Faulty(Drafter):
    """Knows the text, and raises in one hook, `times` times."""

    def __init__(self, hook: str, times: int = 1):
        self.hook, self.left = hook, times
        self.calls: list[str] = []
        self.finished: list[tuple[list[int], bool]] = []
        self.wrong = 0

    def _note(self, hook: str) -> None:
        self.calls.append(hook)
        if hook == self.hook and self.left:
            self.left -= 1
            raise RuntimeError("broken")

    def prefill(self, requests):
        self._note("prefill")

    def prefill_draft(self, requests, max_nodes):
        self._note("prefill_draft")
        return [TokenTree.chain(TEXT[:2]) for _ in requests]

    def start(self, request):
        self.wrong += request.state is not None
        request.state = list(request.output)
        self._note("start")

    def propose(self, requests, max_nodes):
        self.wrong += sum(r.state != r.output for r in requests)
        self._note("propose")
        return [TokenTree.chain(TEXT[len(r.output) :][:2]) for r in requests]

    def observe(self, request, tokens):
        self._note("observe")
        request.state += tokens

    def verified(self, request, tree, predicted):
        self._note("verified")

    def bias(self, request):
        self._note("bias")
        return Bias([TEXT[len(request.output)]], 0.5)

    def finish(self, request, completed):
        self.finished.append((list(request.output), completed))
        self._note("finish")

    @property
    def counters(self):
        self._note("counters")
        return {}


def step(plan, req) -> int:
    """One decode step, verified greedily against the text; how many nodes were drafted."""
    running = plan.requests.update([req], None)
    trees, width = plan.plan(running)
    plan.biases(running)
    rest = TEXT[len(req.output_ids) :]
    right = trees[0].path(rest)
    index = np.full((1, width), -1, dtype=np.int32)
    nodes = [0, *(1 + np.flatnonzero(right))]
    index[0, : len(nodes)] = nodes
    said = np.array([rest[:width]], dtype=np.int32)
    plan.observe(running, trees, pack(req.output_ids[-1:], trees, width), index, said)
    req.output_ids += rest[: 1 + int(right.sum())]
    return len(trees[0])


def serve(plan, req, steps: int = 5) -> list[int]:
    """A request's life; the drafted nodes of each of its steps."""
    plan.prefill([req])
    chains = plan.foresee([req])
    plan.foreseen([req], chains, [TEXT[: 1 + len(chain)] for chain in chains])
    plan.biases_in_prefill([req])
    req.output_ids.append(TEXT[0])
    drafted = [step(plan, req) for _ in range(steps)]
    req.output_ids_through_stop = list(req.output_ids)
    plan.finish(req.rid)
    return drafted


@pytest.mark.parametrize(
    ("hook", "undrafted"),
    [("start", [0]), ("observe", [1]), ("propose", [0])]
    + [(h, []) for h in ("prefill", "prefill_draft", "verified", "bias", "finish", "counters")],
)
def test_a_hook_that_raises_once_costs_that_call_and_no_more(hook, undrafted, caplog):
    drafter = Faulty(hook)
    plan, req = planner(a=drafter), request("r", [])
    drafted = serve(plan, req)
    plan._asked["a"].counters()
    assert drafter.left == 0 and f"drafter a failed in {hook} (failure 1)" in caplog.text
    assert [i for i, nodes in enumerate(drafted) if nodes == 0] == undrafted
    assert req.output_ids == TEXT[: len(req.output_ids)]
    assert drafter.wrong == 0
    begun_anew = hook in ("prefill", "start", "observe")
    assert [completed for _, completed in drafter.finished] == [False] * begun_anew + [True]
    assert drafter.finished[-1][0] == req.output_ids


def test_a_hook_without_a_name_is_guarded_too(caplog):
    class Odd(Recorder):
        bias = partial(divmod, 1, 0)

    plan = planner(a=Odd(TokenTree.empty()))
    assert plan.biases(plan.requests.update([request("r", [5])], None)) == [None]
    assert "drafter a failed in functools.partial" in caplog.text


def test_a_request_whose_observe_failed_starts_anew_with_its_whole_output():
    drafter = Recorder(TokenTree.chain([7]))
    plan, req = planner(a=drafter), request("r", [10])
    plan.requests.update([req], None)
    drafter.observe = lambda request, tokens: 1 / 0
    req.output_ids += [11]
    [running] = plan.requests.update([req], None)
    assert running.drafter is None and plan.plan([running])[1] == 1
    del drafter.observe
    req.output_ids += [12]
    plan.requests.update([req], None)
    assert drafter.calls == [
        ("start", "r", [10]),
        ("finish", "r", [10, 11], False),
        ("start", "r", [10, 11, 12]),
    ]


def test_what_starts_anew_needs_the_host_though_its_drafter_is_silent():
    plan, req = planner(a=Faulty("start")), request("r", [5])
    plan.requests.update([req], None)
    assert plan.needs_host([req], look=True)


@pytest.mark.parametrize("hook", ["start", "observe"])
def test_a_drafter_that_always_fails_is_left_alone_by_the_request_after_three_times(hook):
    drafter = Faulty(hook, times=1000)
    plan, req = planner(a=drafter), request("r", [])
    drafted = serve(plan, req, steps=12)
    assert drafter.calls.count(hook) == 3 and len(drafter.finished) == 3
    assert drafted[-3:] == [0, 0, 0]
    drafter.left = 0
    assert serve(plan, request("next", []))[0] > 0  # others have it still


def test_failures_are_logged_once_in_a_hundred_with_the_traceback_at_first(caplog):
    plan = planner(a=Faulty("propose", times=250))
    running = plan.requests.update([request("r", [5])], None)
    for _ in range(250):
        plan.plan(running)
    lines = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert [r.getMessage() for r in lines] == [
        f"drafter a failed in propose (failure {n}): RuntimeError: broken" for n in (1, 101, 201)
    ]
    assert [bool(r.exc_info) for r in lines] == [True, False, False]


def test_a_failure_at_arrival_leaves_the_request_to_start_as_new(caplog):
    drafter = Faulty("prefill")
    plan, req = planner(a=drafter), arriving("r")
    plan.arrive(req)
    assert plan.requests.prefilled(req) is None
    req.output_ids.append(TEXT[0])
    assert step(plan, req) == 2 and drafter.wrong == 0
    assert drafter.calls[:3] == ["prefill", "finish", "start"]


def test_a_request_that_ends_while_its_drafter_has_lost_it_is_not_finished_twice():
    drafter = Faulty("start")
    plan, req = planner(a=drafter), request("r", [5])
    plan.requests.update([req], None)
    plan.finish("r")
    assert drafter.finished == [([5], False)]


def test_a_requests_options_are_parsed_once(monkeypatch):
    parsed = []
    parse = RequestOptions.parse
    monkeypatch.setattr(
        RequestOptions, "parse", lambda *args: parsed.append(args[0]) or parse(*args)
    )
    for drafter in (Recorder(TokenTree.empty()), Faulty("")):
        plan, req = planner(a=drafter, b=Faulty("")), request("r", [], namespace="mine")
        plan.prefill([req])
        plan.prefill([req])  # the next chunk of its prompt
        req.output_ids.append(10)
        [running] = plan.requests.update([req], None)
        plan.requests.advance(running, [11])
        plan.prefill([req])  # retracted, before it was served what its drafter knows
        [running] = plan.requests.update([req], None)
        assert running.draft.options.namespace == "mine"
        plan.finish("r")
    assert len(parsed) == 2
