"""Baseline: beam search of a fixed length and width, as plain speculative decoding drafts."""

from collections.abc import Generator
from dataclasses import dataclass

from speech.specasr.chain import Chain
from speech.specasr.draft_model import Feed, Prediction
from speech.specasr.draft_options import SpecASROptions
from speech.specasr.draft_tree import ROOT, DraftTree
from speech.specasr.prediction import catch_up, find_start
from speech.specasr.transcript import Transcript
from speech.specasr.vocabulary import Vocabularies


@dataclass(frozen=True)
class _Beam:
    """A path under way: its last node, that node's slot, and what the model says comes next."""

    node: int
    slot: int
    prediction: Prediction


def draft_beams(
    chain: Chain,
    transcript: Transcript,
    vocabularies: Vocabularies,
    options: SpecASROptions,
    room: int,
) -> Generator[Feed, list[Prediction], DraftTree]:
    """At each of `options.trunk_length` steps, the `options.beams` likeliest ways to go on."""
    tree = DraftTree()
    chain.forget_draft(transcript.spelled())
    if not (yield from catch_up(chain, transcript, vocabularies, options.trunk_length, room)):
        return tree
    start = find_start(chain, transcript, vocabularies)
    length = start.length
    if start.token is not None:
        # Both beams begin with the same token.
        chain.truncate(length)
        node = tree.add(ROOT, start.token, start.prob, start.text)
        yield from chain.feed([start.token])
        length += 1
        chain.decoded += 1
    else:
        node = ROOT
    beams = [_Beam(node, length - 1, chain.predictions[-1])]
    chain.drafted = chain.tokens[:length]
    for left in reversed(range(min(options.trunk_length, room - length) - (node != ROOT))):
        grown = _likeliest(tree, beams, options.beams)
        nodes = [tree.add(beam.node, token, prob) for beam, token, prob in grown]
        chain.decoded += len(nodes)
        alive = [
            (node, beam.slot)
            for node, (beam, _, _) in zip(nodes, grown, strict=True)
            if tree.tokens[node] != vocabularies.draft.end
        ]
        if not alive or not left:
            break
        first = len(chain.cache)
        answer = yield Feed([tree.tokens[node] for node, _ in alive], [slot for _, slot in alive])
        beams = [
            _Beam(node, first + i, prediction)
            for i, ((node, _), prediction) in enumerate(zip(alive, answer, strict=True))
        ]
    tree.trunk = tree.path(max(range(len(tree)), key=_deepest(tree))) if len(tree) else []
    chain.truncate(length)
    return tree


def _likeliest(tree: DraftTree, beams: list[_Beam], width: int) -> list[tuple[_Beam, int, float]]:
    """The `width` best (beam, next token, its chance there)."""
    found = [
        (beam, token, prob)
        for beam in beams
        for token, prob in zip(beam.prediction.tokens, beam.prediction.chances, strict=True)
    ]
    found.sort(key=lambda choice: -tree.prob(choice[0].node) * choice[2])
    return found[:width]


def _deepest(tree: DraftTree):
    depths = [0] * len(tree)
    for node, parent in enumerate(tree.parents):
        depths[node] = 1 + (depths[parent] if parent != ROOT else 0)
    return lambda node: (depths[node], tree.probs[node])
