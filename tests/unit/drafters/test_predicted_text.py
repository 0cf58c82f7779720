"""A predicted output as a draft: followed, lost, found again, counted, and given up."""

import pytest

from sglang_ext.drafters import DrafterContext, DraftRequest, load
from sglang_ext.drafters.predicted_text import (
    MOST_TOKENS,
    TOKENS_KEY,
    PredictedText,
    packed_tokens,
    tokens_of,
)
from sglang_ext.options import Options
from sglang_ext.tree import SOURCE_PREVIOUS, SOURCE_REALIGNED

PREDICTED = list(range(100, 200))
PUT_IN = list(range(500, 540))


def steps(predicted: list[int], output: list[int], nodes: int = 15) -> int:
    """Verify steps that an output takes if the prediction alone drafts."""
    text, done, taken = PredictedText(predicted), 1, 0
    while done < len(output):
        text.follow(output[:done])
        tree = text.drafts(nodes)
        tree.check(1000)
        done, taken = done + 1 + int(tree.path(output[done:]).sum()), taken + 1
    return taken


def followed(predicted: list[int], output: list[int]) -> PredictedText:
    text = PredictedText(predicted)
    text.follow(output)
    return text


def test_a_right_prediction_is_drafted_whole():
    assert steps(PREDICTED, PREDICTED) == 7  # 99 tokens, 16 a step
    assert followed(PREDICTED, PREDICTED[:5]).agrees
    assert not followed(PREDICTED, PREDICTED).agrees  # nothing is left


@pytest.mark.parametrize(
    ("output", "most", "accepted"),
    [
        ([*PREDICTED[:40], 999, *PREDICTED[41:]], 10, 99),  # replaced
        ([*PREDICTED[:40], 999, *PREDICTED[40:]], 11, 100),  # put in
        ([*PREDICTED[:40], *PREDICTED[41:]], 10, 99),  # left out
        ([*PREDICTED[:40], *PUT_IN, *PREDICTED[40:]], 54, 100),  # a paragraph put in
        ([*PREDICTED[50:], *PREDICTED[:50]], 18, 100),  # moved
    ],
)
def test_an_edited_prediction_is_drafted_on_behind_each_edit(output, most, accepted):
    assert steps(PREDICTED, output) <= most
    assert abs(followed(PREDICTED, output).accepted - accepted) <= 1


def test_an_unrelated_prediction_is_given_up_at_once():
    text = PredictedText(PREDICTED)
    drafted = []
    for end in range(1, len(PUT_IN) + 1):
        text.follow(PUT_IN[:end])
        drafted.append(len(text.drafts(15)) > 0)
    assert drafted == [True] * 3 + [False] * (len(PUT_IN) - 3)
    assert text.accepted == 0 and not text.agrees


def test_no_more_is_accepted_than_was_written_and_predicted():
    again = [*PREDICTED, *PREDICTED, *PREDICTED]
    assert followed(PREDICTED, again).accepted == len(PREDICTED)
    assert followed([7] * 50, [7] * 10).accepted == 10
    assert followed([], PREDICTED).accepted == 0


def test_following_in_steps_is_following_at_once():
    output = [*PREDICTED[:20], *PUT_IN, *PREDICTED[30:60], 7, *PREDICTED[61:]]
    stepwise, whole = PredictedText(PREDICTED), followed(PREDICTED, output)
    for end in range(1, len(output) + 1):
        stepwise.follow(output[:end])
    assert stepwise.accepted == whole.accepted
    assert stepwise.drafts(8).tokens.tolist() == whole.drafts(8).tokens.tolist()


def test_tokens_travel_and_what_is_none_of_the_model_ends_them():
    assert tokens_of({}, 1000) == []
    assert tokens_of({TOKENS_KEY: packed_tokens(PREDICTED)}, 1000) == PREDICTED
    assert tokens_of({TOKENS_KEY: packed_tokens([1, 2, 5000, 3])}, 1000) == [1, 2]
    assert len(tokens_of({TOKENS_KEY: packed_tokens([1] * (MOST_TOKENS + 9))}, 10)) == MOST_TOKENS
    for wrong in ("?", "AAA=", 7):
        with pytest.raises(ValueError, match=TOKENS_KEY):
            tokens_of({TOKENS_KEY: wrong}, 1000)


@pytest.mark.parametrize("name", ["sssd", "ssbd"])
def test_drafters_take_a_prediction_first_and_then_retrieve(name):
    drafter = load(name, DrafterContext(1000, Options(drafters="ssbd")))
    params = {TOKENS_KEY: packed_tokens(PREDICTED)}
    prompt = [1, 2, *PUT_IN]
    request = DraftRequest("r", prompt, [PREDICTED[0]], params)
    drafter.start(request)
    [tree] = drafter.propose([request], 15)
    assert tree.tokens.tolist() == PREDICTED[1:16]
    assert set(tree.sources.tolist()) == {SOURCE_PREVIOUS}
    request.output += [*PREDICTED[1:30], *PUT_IN[:8]]
    drafter.observe(request, request.output[1:])
    [tree] = drafter.propose([request], 15)
    assert tree.path(PUT_IN[8:]).sum() >= 4  # the prompt has it
    request.output += [*PUT_IN[8:20], *PREDICTED[30:34]]
    [tree] = drafter.propose([request], 15)
    assert tree.tokens.tolist()[:8] == PREDICTED[34:42]
    assert tree.sources[0] & SOURCE_REALIGNED
    drafter.finish(request, True)
    assert request.state is None
