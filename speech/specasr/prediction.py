"""The trunk of a draft: adaptive single-sequence prediction, with or without recycling.

SpecASR, section IV-A: the draft goes on in one sequence, up to `length` tokens, and is cut where
the model is no longer sure, for what follows a doubtful token is mostly decoded for nothing.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from speech.specasr.chain import Chain
from speech.specasr.draft_model import Feed, Prediction
from speech.specasr.draft_options import SpecASROptions
from speech.specasr.draft_tree import ROOT, DraftTree
from speech.specasr.feedback import Guess, advised
from speech.specasr.recycling import OldDraft
from speech.specasr.transcript import Transcript
from speech.specasr.vocabulary import Vocabularies

# What is less likely than this to be right is not worth the target's time in a prefill: the verify
# step behind it asks again.
FORESEEN = 0.2

# A token's probability, the chance of all up to it -> whether the draft ends before it.
Stop = Callable[[float, float], bool]


@dataclass(frozen=True)
class Start:
    """Where a draft begins.

    Attributes:
        length: tokens of the chain that are committed text.
        token: the draft's first token where it completes the open word; None: nothing is forced.
        text: bytes of that token that are not committed.
        prob: its chance.
    """

    length: int
    token: int | None = None
    text: bytes = b""
    prob: float = 1.0


def draft_trunk(
    chain: Chain,
    transcript: Transcript,
    vocabularies: Vocabularies,
    options: SpecASROptions,
    room: int,
) -> Generator[Feed, list[Prediction], DraftTree]:
    """Draft in one sequence, as modes "fixed", "asp" and "recycling" say.

    Args:
        room: positions of the draft model that may be fed.
    """
    if options.mode != "recycling":
        chain.forget_draft(transcript.spelled())
    threshold = 0.0 if options.mode == "fixed" else options.threshold
    length = options.trunk_length
    return (
        yield from _trunk(
            chain, transcript, vocabularies, length, room, lambda prob, _: prob < threshold
        )
    )


def foresee_trunk(
    chain: Chain, transcript: Transcript, vocabularies: Vocabularies, length: int, room: int
) -> Generator[Feed, list[Prediction], DraftTree]:
    """Draft what the target will be asked about in its prefill: a trunk, as far as it may hold."""
    return _trunk(chain, transcript, vocabularies, length, room, lambda _, reach: reach < FORESEEN)


def _trunk(
    chain: Chain,
    transcript: Transcript,
    vocabularies: Vocabularies,
    length: int,
    room: int,
    stop: Stop,
) -> Generator[Feed, list[Prediction], DraftTree]:
    """A trunk behind the committed text, and nothing else."""
    tree = DraftTree()
    if (yield from catch_up(chain, transcript, vocabularies, length, room)):
        start = find_start(chain, transcript, vocabularies)
        yield from extend(chain, tree, start, vocabularies, min(length, room - start.length), stop)
    return tree


def catch_up(
    chain: Chain, transcript: Transcript, vocabularies: Vocabularies, length: int, room: int
) -> Generator[Feed, list[Prediction], bool]:
    """Bring the chain up to the committed text, in one forward pass at most.

    What is left of the last draft is fed behind it, up to `length` tokens.

    Returns:
        False if there is no text, or more than the model has positions for.
    """
    committed = transcript.spelled()
    if not committed or len(committed) >= room:
        return False
    same = chain.common(committed)
    if same < len(committed):
        chain.truncate(min(same, len(chain)))
    new = committed[len(chain) :]
    if new:
        rest = OldDraft.line_up(chain.drafted, committed, vocabularies.draft.key).rest()
        yield from chain.feed(new + rest[: min(length, room - len(committed))])
    return True


def find_start(chain: Chain, transcript: Transcript, vocabularies: Vocabularies) -> Start:
    """Whether the open word is whole for the draft model, or the beginning of a longer token.

    The target may write in two tokens what the draft model writes in one, and be between the two:
    then the likeliest token that begins with the open word's bytes goes on from before it.
    """
    before, tail = len(transcript.tokens), transcript.tail
    spelled = vocabularies.draft.spell_text(tail) if tail else []
    whole, best = 1.0, Start(before + len(spelled))
    best_prob, total = 0.0, 0.0
    rest = tail
    for i, token in enumerate(spelled):
        if before + i == 0:
            break
        prediction = chain.predictions[before + i - 1]
        own = 0.0
        for candidate, prob in zip(prediction.tokens, prediction.chances, strict=True):
            text = vocabularies.draft.bytes_of[candidate]
            if candidate == token:
                own = prob
            elif text is not None and len(text) > len(rest) and text.startswith(rest):
                total += whole * prob
                if whole * prob > best_prob:
                    best_prob = whole * prob
                    best = Start(before + i, candidate, text[len(rest) :], best_prob)
        whole *= own or prediction.chances[-1] / 4
        rest = rest[len(vocabularies.draft.bytes_of[token] or b"") :]
    if best_prob <= whole:
        return Start(before + len(spelled), prob=whole / (whole + total))
    return Start(best.length, best.token, best.text, best_prob / (whole + total))


def extend(
    chain: Chain,
    tree: DraftTree,
    start: Start,
    vocabularies: Vocabularies,
    length: int,
    stop: Stop,
) -> Generator[Feed, list[Prediction], None]:
    """Grow the trunk by the model's likeliest tokens, taking over the old draft where it fits.

    Tokens of the old draft that already follow in the chain are checked against the model's own
    choice and cost no forward pass.
    """
    position = start.length  # of the next token in the chain
    drafted = chain.tokens[:position]
    old = OldDraft.line_up(chain.drafted, drafted, vocabularies.draft.key, chain.choices)
    checked = start.token is None  # the old draft's next token was fed, or decoded, before
    node = ROOT
    while len(tree.trunk) < length:
        text = None
        if start.token is not None and not tree.trunk:
            text = start.text
            token, prob, chance = Guess(start.token, start.prob, start.prob)
        else:
            prediction = chain.predictions[position - 1]
            own = Guess(prediction.tokens[0], prediction.probs[0], prediction.chances[0])
            certain = position < chain.certain and old.same
            token, prob, chance = advised(own, prediction, old, vocabularies, certain)
            chance *= 1.0 if tree.trunk or certain else start.prob
        if stop(prob, tree.prob(node) * chance):
            break
        recycled = checked and old.rest()[:1] == [token]
        chain.recycled += recycled
        chain.decoded += not recycled
        met = old.meet(token)
        node = tree.add(node, token, chance, text)
        tree.trunk.append(node)
        drafted.append(token)
        if token == vocabularies.draft.end or len(tree.trunk) == length:
            break
        if len(chain) <= position or chain.tokens[position] != token:
            chain.truncate(position)
            rest = old.rest()[: length - len(tree.trunk)] if met else []
            yield from chain.feed([token, *rest])
            checked = met
        position += 1
    ended = drafted[-1:] == [vocabularies.draft.end]
    # What was not reached may still be once the doubtful token is settled.
    chain.drafted = drafted if ended else drafted + old.rest()
    chain.start, chain.choices, chain.certain = start.length, {}, 0
    chain.truncate(chain.common(chain.tokens))
