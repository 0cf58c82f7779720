"""Which outcomes the early exit had named, and at which of its candidates."""

import numpy as np
import pytest

from sglang_ext.mirror.foresight import Foreseen, Foresight

# Root 5 -> 7 -> 9, root -> 7's sibling 8; three candidates behind each node.
VIEW = Foreseen(
    np.array([5, 7, 8, 9], np.int32),
    np.array([-1, 0, 0, 1], np.int32),
    np.array([[7, 8, 1], [9, 2, 3], [4, 6, 7], [20, 21, 22]], np.int32),
)


@pytest.mark.parametrize(
    ("committed", "rank"),
    [
        ([8], 1), ([1], 2), ([99], None), ([7, 3], 2), ([7, 9, 20], 0), ([7, 9, 9], None),
        ([8, 6], 1), ([9, 20], None), ([7, 8, 4], None),
    ],
)  # fmt: skip
def test_an_outcome_is_looked_for_behind_its_accepted_node(committed, rank):
    assert VIEW.rank(committed) == rank


def test_outcomes_are_counted_by_the_candidates_that_it_takes():
    foresight = Foresight()
    for committed in ([7], [1], [8, 6], [99]):
        foresight.note(VIEW, committed)
    assert foresight.counters == {
        "outcomes": 4, "foreseen_top1": 1, "foreseen_top2": 2, "foreseen_top4": 3,
        "foreseen_top8": 3, "foreseen_top16": 3,
    }  # fmt: skip
