"""`--drafter auto`: whose drafter is chosen, and what is measured of it."""

from types import SimpleNamespace

import numpy as np
import pytest

from sglang_ext.block_drafter.drafter_manifest import NAME
from sglang_ext.budget.cost_model import CostModel
from sglang_ext.drafters import Bias, DrafterContext
from sglang_ext.drafters.predicted_text import TOKENS_KEY
from sglang_ext.options import Options
from sglang_ext.request_options import RelaxedRule, RequestOptions
from sglang_ext.step.drafter_choice import SPECDEC, SSSD, TOGETHER, Arm, DrafterChoice, arms_of
from sglang_ext.step.drafter_info import note_drafter, told_drafter
from sglang_ext.step.planner import DraftPlanner
from sglang_ext.tree import TokenTree, pack
from tests.unit.step.test_planner import Recorder, request

FLAT = CostModel({1: 1.0, 64: 1.0})
ARMS = (SSSD, SPECDEC, TOGETHER)


class Biased(Recorder):
    def bias(self, request):
        return Bias([5], 0.9)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / NAME).write_text("{}")
    return str(tmp_path)


def auto(folder, **drafters) -> DraftPlanner:
    options = Options(drafter="auto", draft_model=folder, drafters="ssbd", budget="fixed")
    context = DrafterContext(vocab_size=50, options=options)
    return DraftPlanner(context, 8, 64, CostModel({1: 1.0, 64: 1.0}), True, drafters=drafters)


def test_a_server_chooses_among_what_it_has(folder):
    assert arms_of(Options(drafter="auto", draft_model=folder)) == ARMS
    assert arms_of(Options(drafter="auto")) == (SSSD,)
    assert arms_of(Options(drafter="auto", draft_model="whisper-tiny.en")) == (
        Arm("specasr", "specasr"),
    )
    assert arms_of(Options(draft_model=folder)) == ()
    assert Options(drafter="auto", draft_model=folder).loaded_drafters() == ["specdec", "sssd"]


@pytest.mark.parametrize(
    "given",
    [
        {"drafter": "ssbd"},
        {"drafter": "none"},
        {"draft_length": 4},
        {"budget": "fixed"},
        {"relaxed": RelaxedRule()},
    ],
)
def test_a_request_that_says_how_it_is_drafted_for_is_left_alone(given):
    choice = DrafterChoice(ARMS)
    assert choice.choose(RequestOptions(**given), {}) is None
    assert choice.choose(RequestOptions(), {TOKENS_KEY: [1]}) is None and not choice.counts
    assert DrafterChoice(()).choose(RequestOptions(), {}) is None


@pytest.mark.parametrize("retrieve", [True, False])
def test_what_a_request_says_of_retrieval_holds(retrieve):
    choice = DrafterChoice(ARMS)
    params = {"specdec": {"retrieve": retrieve}}
    names = {choice.choose(RequestOptions(), params).arm.name for _ in range(60)}
    assert names == {"sssd", TOGETHER.name if retrieve else SPECDEC.name}


def test_ssbd_is_never_chosen_whatever_its_params_say(folder):
    chain = TokenTree.chain([5])
    plan = auto(folder, sssd=Recorder(chain), specdec=Recorder(chain), ssbd=Biased(chain))
    params = {"ssbd": {"draft": [5, 6], "beta": 0.9}}
    reqs = [request(str(n), [1], **params) for n in range(40)]
    running = plan.requests.update(reqs, None)
    assert {r.drafter.name for r in running} == {"sssd", "specdec"}
    assert plan.biases(running) == [None] * 40
    [named] = plan.requests.update([request("named", [1], drafter="ssbd", **params)], None)
    assert named.drafter.name == "ssbd" and named.tally is None
    assert plan.biases([named]) == [Bias([5], 0.9)]


def test_a_relaxed_request_has_the_drafter_that_it_would_have_without_auto(folder):
    plan = auto(folder, sssd=Recorder(TokenTree.chain([5])), specdec=Recorder(TokenTree.empty()))
    reqs = [request(str(n), [1], relaxed={"top_beta": 3}) for n in range(20)]
    for req in reqs:
        req.sampling_params.top_k = 1
    running = plan.requests.update(reqs, None)
    assert {(r.drafter.name, r.draft.retrieve) for r in running} == {("specdec", None)}
    assert all(r.relaxed is not None and r.tally is None for r in running)


def test_the_choice_reaches_the_drafter_and_the_answer(folder):
    plan = auto(folder, sssd=Recorder(TokenTree.empty()), specdec=Recorder(TokenTree.empty()))
    reqs = [request(str(n), [1]) for n in range(60)]
    seen = set()
    for r, req in zip(plan.requests.update(reqs, None), reqs, strict=True):
        name = req.customized_info["drafter"][-1]
        assert len(req.customized_info["drafter"]) == 2  # beside the token that was sent
        seen.add((name, r.drafter.name, r.draft.retrieve))
    assert seen == {(arm.name, arm.drafter, arm.retrieve) for arm in ARMS}
    assert plan.choice.counts == {arm.name: pytest.approx(20, abs=15) for arm in ARMS}


def step(choice, tallies, asked_s, nodes, lens=None, seconds=1.0, cost=FLAT):
    counted = choice.step(tallies, asked_s, nodes, 0.0)
    if lens is not None:
        index = np.array([[0] * n + [-1] * (8 - n) for n in lens], dtype=np.int32)
        choice.committed(counted, index, cost)
    choice.took(counted, seconds, seconds, cost)


def tally(choice, name="sssd"):
    made = choice.choose(RequestOptions(), {})
    while made.arm.name != name:
        made = choice.choose(RequestOptions(), {})
    return made


def test_tokens_are_counted_where_their_time_is_and_nowhere_else():
    choice = DrafterChoice(ARMS)
    one = tally(choice)
    step(choice, [one, None], {0: 0.0, 1: 0.0}, [3, 3], [4, 4], seconds=1.0)
    assert (one.tokens, one.steps) == (4.0, pytest.approx(1.0))
    step(choice, [one], {}, [0])  # no look: neither
    assert (one.tokens, one.steps) == (4.0, pytest.approx(1.0))
    step(choice, [one], {0: 0.5}, [0])  # asked in vain: a token, and the time that it took
    assert (one.tokens, one.steps) == (5.0, pytest.approx(2.5))
    counted = choice.step([one], {0: 0.0}, [3], 0.0)
    choice.took(counted, 1.0, 1.0, FLAT)  # its tokens never come
    assert (one.tokens, one.steps) == (5.0, pytest.approx(2.5))
    choice.finish(one)
    assert choice.gains == {"sssd": pytest.approx(2.0)}


def test_a_step_that_ends_after_its_request_is_not_counted():
    choice = DrafterChoice(ARMS)
    one = tally(choice)
    counted = choice.step([one], {0: 0.0}, [3], 0.0)
    choice.finish(one)
    choice.committed(counted, np.array([[0, 1, 2, 3]], dtype=np.int32), FLAT)
    choice.took(counted, 1.0, 1.0, FLAT)
    assert choice.gains == {} and one.tokens == 0


def test_what_verifying_takes_beyond_a_plain_step_is_theirs_whose_nodes_it_verifies():
    choice = DrafterChoice(ARMS)
    cost = CostModel({1: 1.0, 2: 1.0, 16: 3.0})
    few, many = tally(choice), tally(choice, "specdec")
    plain = cost.cost(2)
    step(choice, [few, many], {0: 0.0, 1: 0.0}, [1, 3], [1, 1], seconds=2 * plain, cost=cost)
    assert few.steps == pytest.approx(1 + 2 * 0.25) and many.steps == pytest.approx(1 + 2 * 0.75)


def test_a_step_that_was_held_up_does_not_decide():
    choice = DrafterChoice(ARMS)
    one = tally(choice)
    counted = choice.step([one], {0: 0.0}, [3], 0.0)
    choice.committed(counted, np.array([[0, 1, -1, -1]], dtype=np.int32), FLAT)
    choice.took(counted, 500.0, 1.0, FLAT)
    assert one.steps == pytest.approx(2.0)


def test_reading_prompts_is_paid_by_the_next_step_that_counts():
    choice = DrafterChoice(ARMS)
    one, other = tally(choice), tally(choice)
    choice.charge([one, None, other, None], 8.0)
    step(choice, [one, other], {0: 0.0}, [1, 1], [1, 1])
    assert one.steps == pytest.approx(1.0 + 2.0 / 0.5) and other.steps == 0.0


def test_a_long_request_reports_before_it_ends():
    choice = DrafterChoice(ARMS)
    one = tally(choice)
    for _ in range(70):
        step(choice, [one], {0: 0.0}, [2], [3])
    assert choice.gains == {"sssd": pytest.approx(3.0)} and 0 < one.steps < 10


def test_a_server_learns_which_drafter_pays(folder):
    """Two drafters through the planner: one is right about three tokens, the other about none."""
    right, wrong = Recorder(TokenTree.chain([5, 6, 7])), Recorder(TokenTree.chain([9, 9, 9]))
    plan = auto(folder, sssd=wrong, specdec=right)
    for n in range(120):
        req = request(str(n), [1])
        for _ in range(4):
            running = plan.requests.update([req], None)
            trees, width = plan.plan(running)
            accepted = 4 if running[0].drafter.name == "specdec" else 1
            index = np.full((1, width), -1, dtype=np.int32)
            index[0, :accepted] = np.arange(accepted)
            counted = plan.take_counted()
            packed = pack([req.output_ids[-1]], trees, width)
            plan.observe(running, trees, packed, index, None, counted)
            plan.note_step(width, 1.0, 0.0, True, counted)
            req.output_ids += [5] * accepted
        plan.requests.finish(str(n))
    assert plan.take_counted() is None
    counts = plan.choice.counts
    assert counts["specdec"] + counts["specdec+sssd"] > 105 and counts["sssd"] >= 1
    gains = plan.choice.gains
    assert max(gains.values()) > 3 > 1.1 > gains["sssd"]


def test_an_answer_tells_its_own_drafter_in_all_its_parts():
    asks = SimpleNamespace(output_ids=[4], customized_info={"relaxed_tokens": [1]})
    note_drafter(asks, "specdec")
    assert asks.customized_info == {"relaxed_tokens": [1], "drafter": [None, "specdec"]}
    info = {"drafter": [[None, "specdec"], [None, None]], "other": [[1, 2], [3, 4]]}
    states = [SimpleNamespace(), SimpleNamespace()]
    told = [{}, {}]
    for index in range(2):
        rest = told_drafter(told[index], states[index], info, index)
        assert rest == {"other": info["other"]}
    assert told == [{"drafter": "specdec"}, {}]
    later: dict = {}
    told_drafter(later, states[0], {"drafter": [[]]}, 0)
    assert later == {"drafter": "specdec"}
