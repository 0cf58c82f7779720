"""The bandit: which arm it chooses, of what it was told."""

import random
from collections import Counter

import pytest

from sglang_ext.budget.bandit import MOST_NAMESPACES, GainBandit, GainEstimate


def play(bandit, gains, pulls, namespace="default", seed=1):
    """Requests of some steps each, whose tokens scatter around their arm's gain."""
    noise, chosen = random.Random(seed), Counter()
    for _ in range(pulls):
        arm = bandit.choose(namespace, list(gains))
        chosen[arm] += 1
        steps = noise.uniform(3, 30)
        bandit.report(namespace, arm, steps * noise.gauss(gains[arm], 0.3), steps)
    return chosen


@pytest.mark.parametrize("best", ["a", "b", "c"])
def test_the_arm_that_gains_most_gets_most_requests(best):
    gains = {"a": 1.6, "b": 1.6, "c": 1.6, best: 2.0}
    chosen = play(GainBandit("abc"), gains, 400)
    assert chosen[best] > 300 and min(chosen.values()) >= 1


def test_what_pays_now_is_found_out_where_traffic_changes():
    bandit = GainBandit("ab")
    play(bandit, {"a": 2.0, "b": 1.4}, 600)
    assert play(bandit, {"a": 1.4, "b": 2.0}, 2000)["b"] > 1000


def test_each_namespace_has_what_pays_there_and_begins_with_what_pays_elsewhere():
    bandit = GainBandit("ab")
    play(bandit, {"a": 2.4, "b": 1.2}, 200, "first")
    assert play(bandit, {"a": 2.4, "b": 1.2}, 20, "new")["a"] >= 17
    assert play(bandit, {"a": 1.2, "b": 2.4}, 300, "other")["b"] > 250
    assert play(bandit, {"a": 2.4, "b": 1.2}, 100, "first")["a"] > 90
    assert bandit.gains("other")["b"] == pytest.approx(2.4, abs=0.1)
    assert bandit.gains("nobody") == {}


def test_each_arm_is_tried_however_good_the_first_one_is():
    bandit = GainBandit("abc")
    for _ in range(50):
        bandit.report("default", "a", 50.0, 10.0)
    assert set(play(bandit, {"a": 5.0, "b": 5.0, "c": 5.0}, 60)) == set("abc")


def test_only_arms_that_are_possible_are_chosen():
    bandit = GainBandit("abc")
    play(bandit, {"a": 9.0, "b": 1.0, "c": 1.0}, 100)
    assert {bandit.choose("default", ["b", "c"]) for _ in range(50)} <= {"b", "c"}


def test_namespaces_are_bounded_and_the_oldest_go_first():
    bandit = GainBandit("a")
    for n in range(MOST_NAMESPACES + 5):
        bandit.report(str(n), "a", 2.0, 1.0)
        bandit.report("busy", "a", 3.0, 1.0)
    assert bandit.gains("4") == {} and bandit.gains("busy")["a"] == pytest.approx(3.0)
    assert bandit.gains("6") == {"a": pytest.approx(2.0)}


def test_a_gain_is_of_all_tokens_and_all_time_and_surer_with_more_pulls():
    estimate = GainEstimate()
    spreads = [estimate.believed(1.0)[1]]
    for tokens, time in [(2.0, 1.0), (40.0, 10.0), (3.0, 1.0), (20.0, 6.0)]:
        estimate.add(tokens, time)
        spreads.append(estimate.believed(1.0)[1])
    assert estimate.tokens / estimate.time == pytest.approx(65 / 18)
    assert spreads[-1] < spreads[0]
    before = estimate.believed(1.0)
    estimate.fade(0.1)
    after = estimate.believed(1.0)
    assert after[1] > before[1] and after[0] < before[0]  # back towards what was supposed
