"""Which steps look for drafts."""

from sglang_ext.rationing import DRAFTING_SHARE, MOST_UNDRAFTED, DraftingRation

STEP_S = 0.1
LOOK_S = 0.001


def looks(ration: DraftingRation, steps: int, saves, step_s: float = STEP_S) -> list[bool]:
    """Which of so many steps look; the n-th look saves `saves(n)` seconds, 0: finds nothing."""
    looked = []
    for _ in range(steps):
        looked.append(ration.allows())
        if looked[-1]:
            saved = saves(sum(looked))
            ration.note_look(LOOK_S, saved > 0, saved)
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


def test_looks_that_save_less_than_they_take_are_rationed():
    looked = looks(DraftingRation(), 1000, lambda n: 0.002 * (n % 4 == 0))
    assert sum(looked) < 500


def test_looking_ends_soon_after_it_pays_no_more():
    ration = DraftingRation()
    looks(ration, 100, lambda n: 0.03)
    looked = looks(ration, 400, lambda n: 0.0)
    assert all(looked[:32])
    assert sum(looked[200:]) <= 200 * 0.5
