"""The real worker in the order of SGLang's overlap loop: roots, outputs and what drafters learn."""

import pytest

from scripts.emulation.overlap_loop import OverlapLoop, overlap_figures, relay_as_it_stands

SCHEDULES = 80


def test_no_schedule_of_the_overlap_loop_gives_a_wrong_root_or_output():
    figures = overlap_figures(SCHEDULES)
    assert figures["request_steps"] > 100 * SCHEDULES
    assert figures["known_tokens"] > SCHEDULES
    assert figures["relaxed_tokens"] > SCHEDULES
    assert {n: v for n, v in figures.items() if n.startswith(("wrong", "schedules_hit"))} == {
        "wrong_outputs": 0,
        "wrong_roots": 0,
        "wrong_learned": 0,
        "wrong_kv": 0,
        "wrong_marks": 0,
        "schedules_hit": 0,
    }


def test_a_relay_that_is_taken_as_it_stands_is_noticed():
    figures = overlap_figures(5, lacking=relay_as_it_stands)
    assert figures["schedules_hit"] == 5
    assert figures["wrong_outputs"] > 0 and figures["wrong_roots"] > 0


@pytest.mark.parametrize("kind", ["encoders", "_from_afar", "_drains_prefills"])
def test_schedules_are_of_every_kind(kind):
    assert {getattr(OverlapLoop(seed), kind) for seed in range(SCHEDULES)} == {True, False}


def test_schedules_have_steps_that_need_nothing_from_the_host():
    loop = OverlapLoop(1)
    loop.run(200)
    assert loop.blind > 10
