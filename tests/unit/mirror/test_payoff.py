"""What pays, and what a start is refused for."""

import pytest

from sglang_ext.mirror.draft_devices import DraftDevice
from sglang_ext.mirror.pacing import FIRST_WAIT_S, MOST_WAIT_S, Pacing
from sglang_ext.mirror.payoff import (
    RowCosts,
    another_pays,
    kappa_for,
    length_that_pays,
    rows_that_pay,
    rows_to_read_ahead,
    streams_for,
    tokens_of,
)
from sglang_ext.options import OptionError, Options


def test_rows_are_read_while_they_ride_along():
    costs = RowCosts(lambda rows: 1.0 if rows <= 4 else rows / 2)
    likely, unlikely = [0.5] * 16, [1.0, 0.3, 0.2, 0.1, *[0.01] * 12]
    assert rows_that_pay(likely, costs, 99.0) == 4
    assert rows_that_pay(unlikely, costs, 99.0) == 4
    assert rows_that_pay(unlikely, lambda rows: float(rows), 99.0) == 1
    assert rows_that_pay([1.0] * 16, lambda rows: 10.0 + rows, 99.0) == 16


def test_rows_that_cost_little_ride_along_where_nobody_waits():
    def costs(rows: int) -> float:
        return 10.0 + 0.5 * min(rows, 8) + 3.0 * max(0, rows - 8)

    unlikely = [1.0, 0.03, *[0.01] * 14]
    assert rows_that_pay(unlikely, costs, 99.0) == 1
    assert rows_to_read_ahead(unlikely, costs, 99.0) == 8
    assert rows_to_read_ahead(unlikely, costs, 12.0) == 4, "no later than the outcome"
    assert rows_to_read_ahead(unlikely[:3], costs, 99.0) == 3
    assert rows_to_read_ahead(unlikely, costs, 9.0) == 0
    assert rows_to_read_ahead([1.0, *[0.01] * 31], lambda rows: 9.0 + rows, 99.0) == 16, "2.5 times"


def test_a_pass_that_takes_more_from_the_target_than_it_may_save_is_not_run():
    def cost(rows: int) -> float:
        return 10.0 + rows

    assert rows_to_read_ahead([0.02], cost, 99.0) == 0
    assert rows_to_read_ahead([0.02, 0.02, 0.02, 0.02], cost, 99.0) == 4
    assert rows_that_pay([0.02], cost, 99.0) == 1, "who waits has it run all the same"


def test_a_step_waits_on_while_another_token_adds_more_than_the_step_has():
    sure, unsure = [0.9, 0.8], [0.5, 0.05]
    # 20 ms a token beside 300 of a pass: 300 / 20 tokens, less than this promises or more.
    assert another_pays([sure], [sure], 0.8, 0.02, 0.3)
    assert not another_pays([unsure], [unsure], 0.8, 0.02, 0.3)
    assert another_pays([[]], [[]], 0.8, 0.02, 0.3), "nothing is drafted yet"
    assert not another_pays([sure, *[[0.9] * 7] * 7], [sure], 0.8, 0.02, 0.3), "others wait too"
    assert not another_pays([sure], [], 0.8, 0.02, 0.3)


def test_no_row_is_read_that_ends_too_late():
    def cost(rows: int) -> float:
        return 10.0 + rows

    assert rows_that_pay([1.0] * 16, cost, 10.5) == 0
    assert rows_that_pay([1.0] * 16, cost, 13.0) == 3


def test_costs_are_learned_near_what_was_run():
    costs = RowCosts(lambda rows: float(rows))
    for _ in range(100):
        costs.observe(8, 16.0)
    assert costs(8) == pytest.approx(16.0, rel=0.05)
    assert costs(1) == pytest.approx(1.0, rel=0.6)
    assert costs(128) >= costs(64) >= costs(8)


def test_a_step_waits_for_a_draft_that_is_worth_it():
    # 50 ms a token against a pass of 700: all of it; against one of 20: none.
    assert length_that_pays(0.8, 0.05, 0.7, [0], 7)[0] == 7
    assert length_that_pays(0.8, 0.05, 0.02, [0], 7) == (0, 0.0)
    length, most_s = length_that_pays(0.5, 0.05, 0.3, [0], 7)
    assert 0 < length < 7
    assert most_s == pytest.approx(0.3 * (tokens_of(0.5, length) - 1))


def test_one_that_misses_does_not_keep_a_batch_waiting():
    alone, _ = length_that_pays(0.7, 0.05, 0.2, [0], 7)
    beside, _ = length_that_pays(0.7, 0.05, 0.2, [0] + [7] * 15, 7)
    assert alone > 0 and beside == 0
    assert length_that_pays(0.9, 0.05, 0.7, [4, 5], 7)[0] == 7
    assert length_that_pays(0.9, 0.05, 0.7, [7, 7], 7)[0] == 0


@pytest.mark.parametrize(("batch", "kappa"), [(1, 8), (15, 8), (16, 4), (32, 2), (64, 1), (99, 1)])
def test_candidates_shrink_with_the_batch(batch, kappa):
    assert kappa_for(batch, 8) == kappa
    assert kappa_for(batch, 1) == 1
    assert kappa_for(1, 16) == 16


def test_a_large_batch_has_one_stream():
    assert [streams_for(batch, 3) for batch in (1, 15, 16, 64)] == [3, 3, 1, 1]
    assert streams_for(1, 0) == streams_for(64, 0) == 0


@pytest.mark.parametrize(
    ("name", "torch_name", "cores"),
    [
        ("cpu", "cpu", set()),
        ("cpu:1", "cpu", {1}),
        ("cpu:2-4,7", "cpu", {2, 3, 4, 7}),
        ("cuda:1", "cuda:1", set()),
    ],
)
def test_a_device_is_cores_or_a_gpu(name, torch_name, cores):
    assert Options.from_env({"SGLANG_EXT_MIRROR_DEVICE": name}).mirror_device == name
    device = DraftDevice.parse(name)
    assert (device.torch_name, device.cores) == (torch_name, cores)
    assert device.threads == max(1, len(cores))


@pytest.mark.parametrize("name", ["gpu", "cpu:", "cpu:a", "cpu:1,", "cuda:x", ""])
def test_what_is_no_device_is_refused(name):
    with pytest.raises(OptionError, match="expected cpu, cpu:1, cpu:2-3,6 or cuda:0"):
        Options.from_env({"SGLANG_EXT_MIRROR_DEVICE": name})


def test_waits_are_learned_and_tried_again_where_they_did_not_pay():
    pacing = Pacing()
    assert pacing.length([0], [], 7) == (7, FIRST_WAIT_S)
    pacing.note_wait(0.7, 7, in_time=True)
    assert pacing.token_s == pytest.approx(0.1)
    pacing.note_wait(9.0, 1, in_time=False)  # late: nothing is known of what it would have taken
    assert pacing.token_s == pytest.approx(0.1)
    pacing.step_s = 0.01
    lengths = [pacing.length([0], [], 7)[0] for _ in range(64)]
    assert sum(lengths) == 2 and max(lengths) == 1
    pacing.step_s = 2.0
    length, wait_s = pacing.length([0], [], 7)
    assert length >= 5 and wait_s == MOST_WAIT_S
    assert pacing.length([7], [0], 7) == (0, 0.0) == pacing.length([], [0], 7)


def test_drafts_that_are_wrong_are_waited_for_less():
    pacing = Pacing()
    pacing.step_s, pacing.token_s = 0.3, 0.05
    sure, _ = pacing.length([0], [], 7)
    for _ in range(60):
        pacing.note_draft(0, 1)
    assert pacing.alpha < 0.2 and pacing.length([0], [], 7)[0] < sure
    for _ in range(60):
        pacing.note_draft(7, 0)
    assert pacing.alpha > 0.9
