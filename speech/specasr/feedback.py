"""What the target said behind a rejected token, as advice for the next draft.

A verify step gives the target's own token after every node, those behind a rejected one included.
They were said with a wrong token before them, but the audio decides most of what is said: where the
next draft comes back to the old one's words, the target will mostly say there what it said before.
SpecASR's recycling (section IV-B) keeps the draft model's old tokens; this keeps the target's too.
"""

from collections.abc import Callable
from typing import NamedTuple

from speech.specasr.draft_model import Prediction
from speech.specasr.recycling import OldDraft
from speech.specasr.vocabulary import Vocabularies

# The chance that the target says again what it said: where all before it is the same, where the
# draft is back on the old one's words, where it is not yet, and where the draft model has no such
# token among its likeliest.
CERTAIN = 0.999
BACK = 0.97
ASTRAY = 0.5
UNLIKELY = 0.4


class Guess(NamedTuple):
    """A draft's next token, the model's probability of it, and the chance that it is right."""

    token: int
    prob: float
    chance: float


def advised(
    own: Guess,
    prediction: Prediction,
    old: OldDraft,
    vocabularies: Vocabularies,
    certain: bool = False,
) -> Guess:
    """The draft model's own guess, or the target's earlier choice in its place.

    Args:
        prediction: where `own` comes from.
        old: the old draft, lined up with what comes before this token.
        certain: the choice was made with the same tokens before it.
    """
    choice = old.choice()
    if choice is None:
        return own
    trust = CERTAIN if certain else BACK if old.met else ASTRAY
    fits = _fits(choice, vocabularies)
    if fits(own.token):
        return Guess(own.token, max(own.prob, trust), max(own.chance, trust))
    if not old.met and old.would_meet(own.token):
        return own
    for token, chance in zip(prediction.tokens, prediction.chances, strict=True):
        if fits(token):
            return Guess(token, trust, max(chance, trust))
    if not old.met:
        return own
    spelled = _spelled(choice, vocabularies)
    trust = CERTAIN if certain else UNLIKELY
    return own if spelled is None else Guess(spelled, trust, trust)


def _fits(choice: int, vocabularies: Vocabularies) -> Callable[[int], bool]:
    """Whether a token of the draft model's begins as the target's `choice` does, or goes on."""
    text = vocabularies.target.bytes_of[choice]

    def fits(token: int) -> bool:
        own = vocabularies.draft.bytes_of[token]
        if text is None or own is None:
            return vocabularies.special_to_draft(choice) == token
        return bool(own) and (own.startswith(text) or text.startswith(own))

    return fits


def _spelled(choice: int, vocabularies: Vocabularies) -> int | None:
    """The draft model's first token of the target's `choice`."""
    text = vocabularies.target.bytes_of[choice]
    if text is None:
        return vocabularies.special_to_draft(choice)
    return next(iter(vocabularies.draft.spell(text)), None)
