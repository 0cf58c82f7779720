"""Drafting in prefills goes on where it saves more than it takes."""

from sglang_ext.budget.prefill_ration import PrefillRation


def drafted(ration, requests, step_s, prefills, seconds, tokens):
    """How many of so many prefills draft."""
    count = 0
    for _ in range(prefills):
        if ration.allows(requests, step_s):
            ration.note(requests, seconds, tokens)
            count += 1
    return count


def test_it_drafts_where_tokens_save_more_than_drafting_takes():
    assert drafted(PrefillRation(), 1, 0.010, 100, seconds=0.2, tokens=25) == 100


def test_it_hardly_drafts_where_they_do_not():
    ration = PrefillRation()
    assert drafted(ration, 8, 0.012, 100, seconds=1.6, tokens=8 * 25) == 2 + 98 // 32
    assert drafted(ration, 1, 0.010, 100, seconds=0.2, tokens=25) == 100


def test_it_finds_out_that_drafting_pays_again():
    ration = PrefillRation()
    assert drafted(ration, 1, 0.010, 10, seconds=0.2, tokens=2) == 2
    assert drafted(ration, 1, 0.010, 200, seconds=0.2, tokens=60) > 150


def test_a_first_prefill_that_was_held_up_does_not_decide():
    ration = PrefillRation()
    ration.note(1, 30.0, 25)
    assert drafted(ration, 1, 0.010, 50, seconds=0.2, tokens=25) == 50
