"""The closed loop without a model: what is accepted, counted and paid."""

import json
from pathlib import Path

import pytest

from scripts.replay_answers import (
    COSTS,
    FOLDS,
    Answer,
    Total,
    plain_cost,
    read_answers,
    replay,
    see,
)
from sglang_ext.drafters import Drafter
from sglang_ext.tree import TokenTree

ANSWERS = [Answer([1, 2], list(range(10, 10 + n))) for n in (5, 9, 17)]


class Truth(Drafter):
    """Drafts the next tokens of an answer that counts up, or what is wrong."""

    def __init__(self, right: int) -> None:
        self.right = right
        self.finished: list[list[int]] = []

    def propose(self, requests, max_nodes):
        return [
            TokenTree.chain([r.output[-1] + 1 + i for i in range(self.right)]) for r in requests
        ]

    def finish(self, request, completed):
        self.finished.append(list(request.output))


def test_without_drafts_a_token_a_step_at_the_plain_price():
    drafter = Truth(0)
    total = replay(drafter, ANSWERS, 2, budgeted=False)
    assert total.tokens == total.passes == sum(len(a.output) - 1 for a in ANSWERS)
    assert total.nodes == 0
    assert sorted(drafter.finished) == sorted(a.output for a in ANSWERS)
    # 4 steps of both, 4 + 4 of the second beside the third, 12 of the third alone.
    assert total.cost == pytest.approx(8 * COSTS[2] + 12 * COSTS[1])


def test_what_is_right_is_accepted_and_all_nodes_are_paid():
    total = replay(Truth(3), ANSWERS[:1], 1, budgeted=False)
    # Four tokens are left: three of the draft and the bonus.
    assert (total.tokens, total.passes, total.nodes) == (4, 1, 3)
    assert total.cost == COSTS[4]


def test_the_plain_price_is_that_of_the_same_folds():
    answers = [Answer([1], [1, 2, 3]) for _ in range(FOLDS)]
    assert plain_cost(answers, 1) == FOLDS * 2 * COSTS[1]
    assert plain_cost(answers, 4) == FOLDS * 2 * COSTS[1]
    assert plain_cost(answers * 2, 2) == FOLDS * 2 * COSTS[2]


def test_a_drafter_is_shown_whole_answers():
    drafter = Truth(0)
    see(drafter, "r", ANSWERS[0])
    assert drafter.finished == [ANSWERS[0].output]


def test_runs_add_up():
    total = Total(1, 2, 3, 4.0)
    total.add(Total(1, 1, 1, 1.0))
    assert total == Total(2, 3, 4, 5.0)


def test_answers_of_one_workload(tmp_path: Path):
    lines = [
        {"workload": "a", "prompt": [1], "output": [2, 3]},
        {"workload": "b", "prompt": [1], "output": [4, 5]},
        {"workload": "a", "prompt": [1], "output": [6]},
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [a.output for a in read_answers(path, "a")] == [[2, 3]]
    assert [a.output for a in read_answers(path, None)] == [[2, 3], [4, 5]]
