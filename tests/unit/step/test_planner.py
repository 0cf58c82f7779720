"""Requests, their drafters, and what becomes of bad ones."""

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from sglang_ext.budget.cost_model import CostModel
from sglang_ext.drafters import Bias, Drafter, DrafterContext, DrafterError
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptionError, RequestOptions
from sglang_ext.step.planner import DraftPlanner
from sglang_ext.step.request_table import ending_tokens
from sglang_ext.tree import TokenTree, pack

FLAT_COST = {1: 1.0, 64: 1.0}


class Recorder(Drafter):
    """Drafts a fixed answer and writes down what it is told."""

    def __init__(self, answer: Any):
        self.answer = answer
        self.calls: list[tuple] = []

    def start(self, request):
        self.calls.append(("start", request.rid, list(request.output)))

    def observe(self, request, tokens):
        self.calls.append(("observe", request.rid, list(tokens)))

    def finish(self, request, completed):
        self.calls.append(("finish", request.rid, list(request.output), completed))

    def propose(self, requests, max_nodes):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if isinstance(self.answer, list) else [self.answer] * len(requests)


def request(rid: str, output: list[int], max_new_tokens: int = 100, **params: Any):
    return SimpleNamespace(
        rid=rid,
        origin_input_ids_unpadded=[1, 2, 3],
        output_ids=list(output),
        output_ids_through_stop=list(output),
        finished_reason=None,
        customized_info=None,
        eos_token_ids={49},
        tokenizer=None,
        sampling_params=SimpleNamespace(
            ignore_eos=False,
            stop_token_ids=None,
            max_new_tokens=max_new_tokens,
            min_new_tokens=0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            custom_params=params,
        ),
    )


def planner(budget: str = "fixed", **drafters: Drafter) -> DraftPlanner:
    names = list(drafters)
    options = Options(drafter=names[0], drafters=",".join(names), budget=budget)
    context = DrafterContext(vocab_size=50, options=options)
    return DraftPlanner(context, 8, 4, CostModel(FLAT_COST), active=True, drafters=drafters)


def test_a_requests_life_is_told_in_order():
    drafter = Recorder(TokenTree.chain([7]))
    plan = planner(a=drafter)
    req = request("r", [10])
    plan.requests.update([req], None)
    req.output_ids += [11, 12]
    plan.requests.update([req], None)
    # Under overlap, what was committed last arrives before SGLang's own output_ids has it.
    running = plan.requests.update([req], [[13, 14]])
    assert running[0].draft.output == [10, 11, 12, 13, 14]
    req.output_ids += [13, 14, 15]
    req.output_ids_through_stop = req.output_ids[:-1]
    plan.requests.finish("r")
    assert drafter.calls == [
        ("start", "r", [10]),
        ("observe", "r", [11, 12]),
        ("observe", "r", [13, 14]),
        ("observe", "r", [15]),
        ("finish", "r", [10, 11, 12, 13, 14], True),
    ]


def test_a_request_that_is_retracted_before_its_known_tokens_are_served_starts_again():
    drafter = Recorder(TokenTree.chain([7]))
    plan = planner(a=drafter)
    req = request("r", [10])
    [running] = plan.requests.update([req], None)
    plan.requests.advance(running, [11, 12])
    plan.requests.prefill([req])  # its output_ids never got them
    [again] = plan.requests.update([req], [[11]])
    assert again.draft.output == [10, 11]
    assert drafter.calls == [
        ("start", "r", [10]),
        ("observe", "r", [11, 12]),
        ("finish", "r", [10, 11, 12], False),
        ("start", "r", [10, 11]),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("broken"),
        TokenTree.chain([99]),  # outside the vocabulary
        [],  # too few trees
        "nonsense",
    ],
)
def test_a_bad_drafter_costs_the_step_its_draft(answer, caplog):
    plan = planner(bad=Recorder(answer), good=Recorder(TokenTree.chain([5, 6])))
    reqs = [request("x", [1]), request("y", [1], drafter="good")]
    trees, width = plan.plan(plan.requests.update(reqs, None))
    assert [len(tree) for tree in trees] == [0, 2]
    assert width == 3
    assert "drafter bad failed in propose (failure 1)" in caplog.text


def test_trees_end_where_the_output_must():
    plan = planner(a=Recorder(TokenTree.chain([5] * 7)))
    reqs = [
        request("long", [1]),
        request("four left", [1], max_new_tokens=5),
        request("one left", [1], max_new_tokens=2),
        request("short drafts", [1], draft_length=2),
        request("none", [1], drafter="none"),
    ]
    trees, _ = plan.plan(plan.requests.update(reqs, None))
    assert [len(tree) for tree in trees] == [7, 3, 0, 2, 0]


def test_unknown_drafter_from_inside_decodes_plainly(caplog):
    plan = planner(a=Recorder(TokenTree.chain([5])))
    trees, width = plan.plan(plan.requests.update([request("r", [1], drafter="zzz")], None))
    assert len(trees[0]) == 0 and width == 1
    assert "custom_params.drafter" in caplog.text


class Verified(Recorder):
    def verified(self, request, tree, predicted):
        self.calls.append(("verified", request.rid, tree.tokens.tolist(), predicted))
        if 99 in predicted:
            raise RuntimeError("broken")


@pytest.mark.parametrize("broken", [False, True])
def test_drafters_that_ask_are_told_what_the_target_said_at_every_node(broken, caplog):
    drafter, other = Verified(TokenTree.chain([5, 6])), Recorder(TokenTree.chain([5]))
    plan = planner(a=drafter, b=other)
    running = plan.requests.update([request("x", [1]), request("y", [1], drafter="b")], None)
    trees, width = plan.plan(running)
    index = np.array([[0, -1, -1], [3, -1, -1]], dtype=np.int32)
    said = np.array([[7, 99 if broken else 8, 9], [1, 2, 0]], dtype=np.int32)
    plan.observe(running, trees, pack([1, 1], trees, width), index, said)
    assert drafter.calls[-1] == ("verified", "x", [5, 6], said[0].tolist())
    assert ("drafter a failed in verified" in caplog.text) == broken
    plan.observe(running, trees, pack([1, 1], trees, width), index)  # sampled: not told
    assert [call[0] for call in drafter.calls].count("verified") == 1


class Foreseeing(Verified):
    def __init__(self, chain):
        super().__init__(TokenTree.chain([5]))
        self.chain = chain

    def prefill(self, requests):
        self.calls.append(("prefill", [r.rid for r in requests]))

    def prefill_draft(self, requests, max_nodes):
        self.calls.append(("prefill_draft", [r.rid for r in requests], max_nodes))
        if isinstance(self.chain, Exception):
            raise self.chain
        return [self.chain] * len(requests)


def test_what_may_be_read_behind_a_prompt():
    drafter, other = Foreseeing(TokenTree.chain([5, 6, 7])), Recorder(TokenTree.chain([5]))
    plan = planner(a=drafter, b=other)
    reqs = [
        request("x", []),
        request("y", [], drafter="b"),
        request("z", [], max_new_tokens=3),
        request("once retracted", [4]),
    ]
    plan.prefill(reqs)
    chains = plan.foresee(reqs)
    assert drafter.calls[1:] == [("prefill_draft", ["x", "z"], 7)]
    assert [len(chain) for chain in chains] == [3, 0, 2, 0]
    plan.foreseen(reqs, chains, [[5, 6, 1, 2], [9], [5, 1, 1], [3]])
    assert drafter.calls[2:] == [
        ("verified", "x", [5, 6, 7], [5, 6, 1, 2]),
        ("verified", "z", [5, 6], [5, 1, 1]),
    ]


@pytest.mark.parametrize(("step_s", "drafted"), [(1e-12, 2), (10.0, 6)])
def test_prompts_are_drafted_for_where_the_tokens_save_more_than_that_takes(step_s, drafted):
    drafter = Foreseeing(TokenTree.chain([5, 6, 7]))
    plan = planner(budget="auto", a=drafter, b=Recorder(TokenTree.chain([5])))
    plan.cost.observe(1, step_s)
    for i in range(6):
        reqs = [request(f"r{i}", []), request(f"other{i}", [], drafter="b")]
        plan.prefill(reqs)
        plan.foreseen(reqs, plan.foresee(reqs), [[5, 6, 7, 1], [9]])
    assert [call[0] for call in drafter.calls].count("prefill_draft") == drafted
    [last, other] = plan.requests.update(reqs, None)
    assert (last.drafter is not None) == (drafted == 6)
    assert other.drafter is not None


def test_what_is_biased_does_not_depend_on_what_prompts_drafts_save():
    class Both(Foreseeing):
        def bias(self, request):
            return Bias([7], 0.2)

    plan = planner(budget="auto", a=Both(TokenTree.chain([5, 6, 7])))
    plan.cost.observe(1, 1e-12)
    for i in range(6):
        reqs = [request(f"r{i}", [])]
        plan.prefill(reqs)
        plan.foreseen(reqs, plan.foresee(reqs), [[9]])
        assert plan.biases_in_prefill(reqs) == [Bias([7], 0.2)]


@pytest.mark.parametrize("chain", [RuntimeError("broken"), TokenTree.chain([99])])
def test_a_drafter_that_cannot_foresee_costs_nothing(chain, caplog):
    plan = planner(a=Foreseeing(chain))
    reqs = [request("x", [])]
    plan.prefill(reqs)
    assert [len(chain) for chain in plan.foresee(reqs)] == [0]
    assert "drafter a failed in prefill_draft" in caplog.text


def test_auto_budget_stops_verifying_what_is_never_accepted():
    tree = TokenTree.chain([5] * 7, prob=0.9)
    plan = planner(budget="auto", a=Recorder(tree))
    plan.cost = CostModel({1: 1.0, 8: 1.6})
    running = plan.requests.update([request("r", [1])], None)
    widths = []
    for _ in range(30):
        trees, width = plan.plan(running)
        widths.append(width)
        packed = pack([1], trees, width)
        accept_index = np.full((1, width), -1, dtype=np.int32)
        accept_index[0, 0] = 0
        plan.observe(running, trees, packed, accept_index)
    assert widths[0] > 4 and widths[-1] == 1


def test_each_request_is_cut_to_the_nodes_that_pay():
    sure, poor = TokenTree.chain([5] * 7, prob=0.97), TokenTree.chain([6] * 7, prob=0.05)
    plan = planner(budget="auto", a=Recorder([sure, poor]))
    plan.cost = CostModel({1: 1.0, 16: 2.0})
    running = plan.requests.update([request("x", [1]), request("y", [1])], None)
    trees, width = plan.plan(running)
    assert len(trees[0]) >= 5 and len(trees[1]) == 0
    assert width == len(trees[0]) + 1


class Sleeper(Recorder):
    """Takes as long as a step to find nothing."""

    def propose(self, requests, max_nodes):
        self.calls.append(("propose",))
        time.sleep(0.002)
        return [TokenTree.empty()] * len(requests)


@pytest.mark.parametrize(("budget", "calls"), [("auto", 6), ("fixed", 100)])
def test_drafting_that_never_pays_takes_little_of_the_time(budget, calls):
    drafter = Sleeper(None)
    plan = planner(budget=budget, a=drafter)
    running = plan.requests.update([request("x", [1])], None)
    for _ in range(100):
        plan.plan(running, plan.looks())
        plan.note_step(1, 0.02, plan.reads(running))
    proposed = sum(call == ("propose",) for call in drafter.calls)
    assert proposed == pytest.approx(calls, abs=1)


@pytest.mark.parametrize(
    ("ending", "drafted"),
    [
        ({}, [7]),
        ({"ignore_eos": True}, [7, 49, 8]),
        ({"ignore_eos": True, "stop_token_ids": [7]}, [7, 49, 8]),
        ({"stop_token_ids": [7]}, []),
    ],
)
def test_what_ends_a_request_is_not_drafted(ending, drafted):
    # Committed in one step with what follows it, SGLang would look for stop strings behind it.
    plan = planner(a=Recorder(TokenTree.chain([7, 49, 8])))
    req = request("r", [10])
    vars(req.sampling_params).update(ending)
    trees, _ = plan.plan(plan.requests.update([req], None))
    assert trees[0].tokens.tolist() == drafted


def test_every_token_that_sglang_ends_a_request_at_is_known():
    req = request("r", [10])
    req.sampling_params.stop_token_ids = {3}
    req.tokenizer = SimpleNamespace(eos_token_id=5, additional_stop_token_ids={6, 49})
    assert ending_tokens(req).tolist() == [3, 5, 6, 49]


def test_metrics_tell_what_was_proposed_and_accepted():
    tree = TokenTree(
        np.array([5, 6, 7]),
        np.array([-1, 0, -1], dtype=np.int32),
        np.array([0.9, 0.8, 0.1], dtype=np.float32),
        np.array([1, 5, 8], dtype=np.int8),
    )
    plan = planner(a=Recorder(tree))
    plan.metrics = Mock()
    plan.metrics.gauges_due.return_value = False
    running = plan.requests.update([request("r", [1])], None)
    trees, width = plan.plan(running)
    plan.observe(running, trees, pack([1], trees, width), np.array([[0, 1, -1, -1]]))
    plan.metrics.note_width.assert_called_once_with(4.0)
    reported, accepted = plan.metrics.note_verified.call_args.args
    assert reported == [tree] and accepted[0].tolist() == [True, False, False]


def test_a_step_that_ends_after_its_request_has_left_teaches_nothing():
    drafter = Verified(TokenTree.chain([5, 6]))
    plan = planner(a=drafter)
    plan.metrics = Mock()
    plan.metrics.gauges_due.return_value = False
    reqs = [request("gone", [1]), request("here", [2])]
    running = plan.requests.update(reqs, None)
    trees, width = plan.plan(running)
    packed = pack([1, 2], trees, width)
    plan.requests.finish("gone")
    said = np.array([[5, 6, 7], [5, 6, 7]], dtype=np.int32)
    plan.observe(running, trees, packed, np.array([[0, 1, 2], [3, 4, 5]], dtype=np.int32), said)
    assert [call for call in drafter.calls if call[0] == "verified"] == [
        ("verified", "here", [5, 6], [5, 6, 7])
    ]
    assert len(plan.metrics.note_verified.call_args.args[0]) == 1


@pytest.mark.parametrize(("nodes", "width"), [(0, 1), (1, 2), (2, 4), (3, 4), (5, 8), (7, 8)])
def test_a_device_step_has_the_least_captured_width_that_holds_its_trees(nodes, width):
    plan = planner(a=Recorder(TokenTree.chain(range(1, nodes + 1))))
    plan.use_widths((1, 2, 4, 8), lambda bs: bs)
    running = plan.requests.update([request("x", [1])], None)
    trees, chosen = plan.plan(running)
    assert (len(trees[0]), chosen) == (nodes, width)


def test_on_a_device_a_look_takes_until_its_step_is_launched():
    plan = planner(budget="auto", a=Recorder(TokenTree.chain([5])))
    plan.use_widths((1, 2, 4, 8), lambda bs: bs)
    running = plan.requests.update([request("x", [1])], None)
    plan.plan(running, plan.looks())
    assert plan._ration is not None and plan._ration.drafting_s == 0.0
    plan.note_look(0.25)
    assert plan._ration.drafting_s == 0.25
    plan.note_look(9.0)  # a step that did not look
    assert plan._ration.drafting_s == 0.25


@pytest.mark.parametrize(
    ("settings", "look", "needed"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"drafter": "none"}, True, False),
        ({"draft_length": 0}, True, False),
        ({"budget": "fixed"}, False, True),
    ],
)
def test_a_step_needs_the_host_only_to_draft(settings, look, needed):
    plan = planner(a=Recorder(TokenTree.chain([5])))
    req = request("x", [1], **settings)
    assert plan.needs_host([req], look)  # its first step: it is not known yet
    plan.requests.update([req], None)
    assert plan.needs_host([req], look) == needed


def test_penalties_and_biases_need_the_host():
    class Biasing(Recorder):
        def bias(self, request):
            return None

    plan = planner(a=Recorder(TokenTree.empty()), b=Biasing(TokenTree.empty()))
    reqs = [request("plain", [1]), request("penal", [1]), request("biased", [1], drafter="b")]
    reqs[1].sampling_params.repetition_penalty = 1.2
    plan.requests.update(reqs, None)
    assert [plan.needs_host([req], look=False) for req in reqs] == [False, True, True]


def test_requests_that_vanish_are_forgotten():
    plan = planner(a=Recorder(TokenTree.empty()))
    for i in range(20):
        plan.requests.update([request(str(i), [1])], None)
    assert len(plan.requests._running) <= 5


def test_unknown_drafters_are_named_with_the_installed_ones():
    from sglang_ext.drafters import load

    with pytest.raises(DrafterError, match=r"unknown drafter 'zzz'; installed: .*sssd"):
        load("zzz", DrafterContext(vocab_size=5, options=Options()))


class Reader(Recorder):
    """A drafter that reads prompts beside the target."""

    def prefill(self, requests):
        self.calls.append(("prefill", [r.rid for r in requests], [r.output for r in requests]))


def test_a_drafter_reads_prompts_once_and_with_the_target():
    drafter = Reader(TokenTree.chain([7]))
    plan = planner(a=drafter, b=Recorder(TokenTree.empty()))
    first, second, other = request("r", []), request("s", []), request("t", [], drafter="b")
    plan.prefill([first, other])
    plan.prefill([first, second])  # a later chunk of the first one's prompt
    first.output_ids = [10]
    running = plan.requests.update([first], None)
    plan.prefill([first])  # it comes back after a retraction
    assert drafter.calls == [
        ("prefill", ["r"], [[10]]),  # the very object that the drafter saw, its output grown
        ("prefill", ["s"], [[]]),
        ("start", "r", [10]),
    ]
    assert running[0].draft.output == [10]


def test_a_request_can_ask_for_all_its_drafts_to_be_verified():
    poor = TokenTree.chain([5] * 7, prob=0.01)
    plan = planner(budget="auto", a=Recorder(poor))
    plan.cost = CostModel({1: 1.0, 16: 20.0})
    reqs = [request("r", [1]), request("s", [1], budget="fixed")]
    trees, width = plan.plan(plan.requests.update(reqs, None))
    assert [len(tree) for tree in trees] == [0, 7] and width == 8


def test_a_budget_that_is_none_is_refused():
    with pytest.raises(RequestOptionError, match=r"custom_params\.budget must be auto or fixed"):
        RequestOptions.parse({"budget": 7}, ["a"])


class Biased(Recorder):
    """Biases every request as it is told."""

    def bias(self, request):
        if isinstance(self.wanted, Exception):
            raise self.wanted
        return self.wanted

    def prefill(self, requests):
        self.calls.append(("prefill", [r.rid for r in requests]))


@pytest.mark.parametrize(
    "wanted", [None, Bias([50], 0.2), Bias([1], 2.0), RuntimeError("lost")], ids=str
)
def test_a_bias_that_is_none_leaves_the_step_as_it_is(wanted):
    drafter = Biased(TokenTree.empty())
    drafter.wanted = wanted
    made = planner(biased=drafter)
    running = made.requests.update([request("a", [4])], None)
    assert made.biases(running) == [None]


def test_biases_of_prefills_know_retracted_requests():
    drafter = Biased(TokenTree.empty())
    drafter.wanted = Bias([7], 0.2)
    made = planner(biased=drafter)
    old, new, unknown = request("old", [4]), request("new", []), request("x", [])
    made.requests.update([old], None)
    old.output_ids.append(5)  # written in its last step, then retracted
    made.prefill([old, new])
    assert made.biases_in_prefill([old, new, unknown]) == [drafter.wanted, drafter.wanted, None]
    assert ("observe", "old", [5]) in drafter.calls
    assert ("prefill", ["new"]) in drafter.calls


def test_what_is_committed_in_a_step_leaves_less_room_for_its_trees():
    drafter = Recorder(TokenTree.chain([7, 8, 9, 10, 11, 12, 13], 0.99))
    plan = planner(a=drafter)  # 8 wide
    running = plan.requests.update([request("r", [1]), request("s", [1])], None)
    plan.requests.advance(running[0], [2, 3, 4, 5])
    trees, width = plan.plan(running, committed=[4, 0])
    assert [len(tree) for tree in trees] == [3, 7] and width == 8
    assert drafter.calls[-1] == ("observe", "r", [2, 3, 4, 5])
    # SGLang's own list has them by the next step: they are told once.
    running[0].req.output_ids += [2, 3, 4, 5, 7]
    plan.requests.update([running[0].req], None)
    assert drafter.calls[-1] == ("observe", "r", [7])


class Preparing(Recorder):
    def prepare(self, requests):
        self.calls += [("prepare", r.rid, list(r.output)) for r in requests]
        for r in requests:
            r.state = "ready"


def arriving(rid: str, **params: Any):
    req = request(rid, [], **params)
    req.finished = lambda: req.finished_reason is not None
    req.time_stats = SimpleNamespace(wait_queue_entry_time=time.perf_counter() + 1.0)
    return req


def test_a_drafter_prepares_while_another_server_reads_the_prompt():
    drafter = Preparing(TokenTree.chain([7]))
    plan = planner(a=drafter)
    plan.metrics = Mock()
    req = arriving("r")
    plan.arrive(req)
    assert drafter.calls == [("prepare", "r", [])]
    req.output_ids.append(10)
    running = plan.requests.update([req], None)
    assert drafter.calls[1:] == [("start", "r", [10])]
    assert running[0].draft.state == "ready"
    plan.note_handed_over(running)
    plan.note_handed_over(running)
    (lead,) = plan.metrics.note_draft_lead.call_args_list
    assert 0.5 < lead.args[0] <= 1.0


def test_drafters_without_prepare_read_the_prompt_at_arrival():
    drafter = Reader(TokenTree.chain([7]))
    plan = planner(a=drafter)
    plan.arrive(arriving("r"))
    plan.arrive(arriving("plain", drafter="none"))
    plan.arrive(arriving("undrafted", draft_length=0))
    assert drafter.calls == [("prefill", ["r"], [[]])]


def test_a_drafter_that_fails_to_prepare_starts_later(caplog):
    class Full(Recorder):
        def prepare(self, requests):
            raise RuntimeError("no room")

    drafter = Full(TokenTree.chain([7]))
    plan = planner(a=drafter)
    req = arriving("r")
    plan.arrive(req)
    req.output_ids.append(10)
    plan.requests.update([req], None)
    assert drafter.calls == [("finish", "r", [], False), ("start", "r", [10])]
    assert "no room" in caplog.text


def test_requests_whose_kv_never_came_are_forgotten():
    plan = planner(a=Preparing(TokenTree.chain([7])))
    failed = [arriving(f"failed {i}") for i in range(4)]
    for req in failed:
        plan.arrive(req)
        req.finished_reason = object()
    waiting = arriving("waiting")
    plan.arrive(waiting)
    assert [plan.requests.prefilled(req) for req in failed] == [None] * 4
    assert plan.requests.prefilled(waiting) is not None


def test_looks_for_requests_with_a_fixed_budget_say_nothing_about_the_others():
    plan = planner("auto", a=Recorder(TokenTree.empty()))
    plan._ration = Mock(**{"allows.return_value": False})
    fixed = request("x", [1], budget="fixed")
    plan.plan(plan.requests.update([fixed], None))
    assert not plan._ration.note_look.called
    plan.plan(plan.requests.update([fixed, request("y", [1])], None))
    assert plan._ration.note_look.called
