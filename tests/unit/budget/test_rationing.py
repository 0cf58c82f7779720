"""Which steps look for drafts."""

import itertools

from sglang_ext.budget.rationing import (
    DRAFTING_SHARE,
    MOST_UNDRAFTED,
    MOST_VERIFIED,
    DraftingRation,
)

STEP_S = 0.1
LOOK_S = 0.001


def looks(
    ration: DraftingRation, steps: int, saves, step_s: float = STEP_S, look_s: float = LOOK_S
) -> list[bool]:
    """Which of so many steps look; the n-th look saves `saves(n)` seconds, 0: finds nothing."""
    looked = []
    for _ in range(steps):
        looked.append(ration.allows())
        if looked[-1]:
            saved = saves(sum(looked))
            ration.note_look(look_s, saved > 0, saved)
        ration.note_step(step_s)
    return looked


def test_looks_that_find_nothing_get_their_share_of_the_time():
    looked = looks(DraftingRation(), 1000, lambda n: 0.0)
    assert looked[0]
    assert 0.7 < sum(looked) * LOOK_S / (1000 * STEP_S * DRAFTING_SHARE) <= 1.1


def test_text_that_begins_to_repeat_is_noticed_whatever_looking_takes():
    looked = looks(DraftingRation(), 10 * MOST_UNDRAFTED, lambda n: 0.0, step_s=1e-6)
    assert sum(looked) >= 9


def test_every_step_looks_while_looking_pays_in_the_mean():
    ration = DraftingRation()
    looks(ration, 50, lambda n: 0.03 * (n % 3 == 0))
    assert all(looks(ration, 200, lambda n: 0.03 * (n % 3 == 0)))


def test_a_first_look_that_loads_what_it_runs_holds_up_no_later_one():
    ration = DraftingRation()
    for seconds in (100 * LOOK_S, LOOK_S, 2 * LOOK_S):
        assert ration.allows()
        ration.note_look(seconds, True, 2 * LOOK_S)
        ration.note_step(STEP_S)
    assert LOOK_S <= ration.drafting_s < 1.2 * LOOK_S
    assert sum(looks(ration, 100, lambda n: 2 * LOOK_S)) > 90


def test_looks_that_save_less_than_they_take_are_rationed():
    looked = looks(DraftingRation(), 1000, lambda n: 0.002 * (n % 4 == 0))
    assert sum(looked) < 500


def test_looking_ends_soon_after_it_pays_no_more():
    ration = DraftingRation()
    looks(ration, 100, lambda n: 0.03)
    looked = looks(ration, 400, lambda n: 0.0)
    assert sum(looked[:32]) >= 31
    assert sum(looked[200:]) <= 200 * 0.5


def test_a_device_that_waits_for_looks_loses_little_where_they_find_nothing():
    # A third of a step each, as at large batches on a GPU.
    looked = looks(DraftingRation(), 1000, lambda n: 0.0, look_s=0.3 * STEP_S)
    assert all(looked[:4])
    assert sum(looked) * 0.3 < 0.01 * 1000


def test_looks_that_find_drafts_but_save_less_than_they_take_are_no_reason_to_look_again():
    looked = looks(DraftingRation(), 2000, lambda n: 0.5 * 0.02, look_s=0.02)
    assert sum(looked) * 0.01 < 0.01 * 2000 * STEP_S


def test_looks_that_nearly_pay_come_again_sooner():
    far, near = (
        sum(looks(DraftingRation(), 2000, lambda n, part=part: part * 0.02, look_s=0.02))
        for part in (0.1, 0.9)
    )
    assert near > 3 * far


def test_text_that_repeats_is_followed_from_the_first_look_that_pays():
    ration = DraftingRation()
    looks(ration, 500, lambda n: 0.0, look_s=0.02)
    looked = looks(ration, 200, lambda n: 0.06, look_s=0.02)
    first = looked.index(True)
    assert first <= MOST_UNDRAFTED
    assert sum(looked[first:]) >= 0.9 * len(looked[first:])


def test_plain_steps_are_timed_where_every_step_verifies():
    ration = DraftingRation()
    looked = looks(ration, 2000, lambda n: 0.03)
    plain = [i for i, look in enumerate(looked) if not look]
    assert plain[0] < 8 and 8 <= len(plain) <= 16
    assert max(b - a for a, b in itertools.pairwise(plain)) <= MOST_VERIFIED + 1


def test_no_plain_step_is_asked_for_where_some_decode_plainly_or_drafts_save_whole_steps():
    assert all(looks(DraftingRation(), 1000, lambda n: 0.09 * (n % 3 > 0)))
    assert sum(looks(DraftingRation(), 1000, lambda n: 4 * STEP_S)) >= 998
