"""Two-pass sparse tree (SpecASR, section IV-C).

Pass 1 drafts a greedy trunk past doubtful tokens. Pass 2 tries the second-best token there, and
only there: all branches grow together, one forward pass a token for all of them, and each is cut
short where it says what the trunk, or an earlier branch, says at the same or an adjacent position;
from there on it has that one's tokens. In speech the audio soon brings a draft back on its path, so
branches are short.
"""

from collections.abc import Generator
from dataclasses import dataclass, field

from speech.specasr.chain import Chain
from speech.specasr.draft_model import Feed, Prediction
from speech.specasr.draft_options import SpecASROptions
from speech.specasr.draft_tree import ROOT, DraftTree
from speech.specasr.prediction import Start, catch_up, extend, find_start
from speech.specasr.transcript import Transcript
from speech.specasr.vocabulary import Vocabularies

# Positions, from its own, at which a branch may meet another.
_OFFSETS = (0, -1, 1)
# A trunk's token below this chance is doubtful: its second-best is tried.
DOUBTFUL = 0.9
# What is less likely than this to be on the output's path is not worth a place in a verify step.
FLOOR = 0.08
# Tokens that a branch may take to rejoin.
BRANCH_LENGTH = 8


@dataclass
class _Path:
    """The trunk or a branch: tokens, each with its chance given those before it.

    Attributes:
        position: of the first token, counted from the trunk's first.
        node: the tree's node before the first token.
        slot: the cache's slot of the last token fed; of the token before the first one if none is.
        rejoins: the path that this one goes on with, and the index of its next token.
    """

    position: int
    node: int
    slot: int
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    reach: float = 1.0
    rejoins: "tuple[_Path, int] | None" = None

    def add(self, token: int, prob: float) -> None:
        self.tokens.append(token)
        self.probs.append(prob)
        self.reach *= prob


def draft_sparse_tree(
    chain: Chain,
    transcript: Transcript,
    vocabularies: Vocabularies,
    options: SpecASROptions,
    room: int,
    max_nodes: int,
) -> Generator[Feed, list[Prediction], DraftTree]:
    """Draft as mode "tsp" says, recycling included.

    Args:
        room: positions of the draft model that may be fed.
        max_nodes: nodes of use at most.
    """
    tree = DraftTree()
    if not (yield from catch_up(chain, transcript, vocabularies, options.trunk_length, room)):
        return tree
    start = find_start(chain, transcript, vocabularies)
    length = min(options.trunk_length, max_nodes, room - start.length)
    yield from extend(chain, tree, start, vocabularies, length, lambda _, reach: reach < FLOOR)
    trunk = _Path(0, ROOT, -1)
    for node in tree.trunk:
        trunk.add(tree.tokens[node], tree.probs[node] / max(1e-9, tree.prob(tree.parents[node])))
    fed = len(chain)
    branches = _branches(chain, tree, start, max_nodes)
    yield from _grow(branches, trunk, chain, room - start.length, vocabularies.draft.end)
    chain.truncate(fed)
    for branch in branches:
        _attach(tree, branch)
    return tree


def _branches(chain: Chain, tree: DraftTree, start: Start, max_nodes: int) -> list[_Path]:
    """The second-best tokens of the trunk's doubtful positions, the likeliest first."""
    branches = []
    for i, node in enumerate(tree.trunk):
        before = start.length + i - 1  # the slot of the token before this one
        if (i == 0 and start.token is not None) or before >= len(chain):
            continue
        prediction = chain.predictions[before]
        above = tree.prob(tree.parents[node])
        given = tree.probs[node] / max(1e-9, above)
        if given >= DOUBTFUL:
            continue
        # The trunk has the target's earlier choice where it is not the model's likeliest token.
        second = int(prediction.tokens[0] == tree.tokens[node])
        branch = _Path(i, tree.parents[node], before, reach=above)
        chance = prediction.chances[second] * (start.prob if i == 0 else 1.0)
        branch.add(prediction.tokens[second], min(chance, 1 - given))
        if branch.reach >= FLOOR:
            branches.append(branch)
    branches.sort(key=lambda branch: -branch.reach)
    return branches[:max_nodes]


def _grow(
    branches: list[_Path], trunk: _Path, chain: Chain, room: int, end: int
) -> Generator[Feed, list[Prediction], None]:
    """Extend all branches together, each until it rejoins, ends or is too unlikely."""
    growing = []
    for index, branch in enumerate(branches):
        if branch.tokens[-1] != end and not _rejoin(branch, [trunk, *branches[:index]]):
            growing.append(branch)
    for _ in range(BRANCH_LENGTH):
        growing = [b for b in growing if b.position + len(b.tokens) < room]
        if not growing:
            return
        first = len(chain.cache)
        predictions = yield Feed([b.tokens[-1] for b in growing], [b.slot for b in growing])
        still = []
        for slot, (branch, prediction) in enumerate(zip(growing, predictions, strict=True), first):
            branch.slot = slot
            branch.add(prediction.tokens[0], prediction.chances[0])
            chain.decoded += 1
            earlier = branches[: branches.index(branch)]
            if branch.tokens[-1] == end or branch.reach < FLOOR:
                continue
            if not _rejoin(branch, [trunk, *earlier]):
                still.append(branch)
        growing = still


def _rejoin(branch: _Path, others: list[_Path]) -> bool:
    """Whether the branch's last token is another's at the same or an adjacent position."""
    last = branch.position + len(branch.tokens) - 1
    for other in others:
        for offset in _OFFSETS:
            index = last + offset - other.position
            # Only behind the place where the branch left: before it the tokens are its own.
            if last + offset < branch.position or not 0 <= index < len(other.tokens):
                continue
            if other is not branch and other.tokens[index] == branch.tokens[-1]:
                branch.rejoins = (other, index + 1)
                return True
    return False


def _attach(tree: DraftTree, branch: _Path) -> None:
    """Add a branch's nodes to the tree, and those of the path that it rejoins."""
    node = branch.node
    path, index = branch, 0
    while True:
        for token, prob in zip(path.tokens[index:], path.probs[index:], strict=True):
            if prob * tree.prob(node) < FLOOR:
                return
            node = tree.add(node, token, prob)
        if path.rejoins is None:
            return
        # Only earlier paths are rejoined, so this ends.
        path, index = path.rejoins
