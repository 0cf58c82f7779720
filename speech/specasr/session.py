"""SpecASR for many requests at once: each drafts at its own pace, all share the forward passes."""

import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from speech.specasr.beams import draft_beams
from speech.specasr.cache import DraftCache
from speech.specasr.chain import Chain
from speech.specasr.draft_model import DraftWhisper, Feed, Prediction
from speech.specasr.draft_options import SpecASROptions
from speech.specasr.draft_tree import DraftTree, TargetTree, to_target
from speech.specasr.prediction import draft_trunk, foresee_trunk
from speech.specasr.sparse_tree import draft_sparse_tree
from speech.specasr.transcript import Transcript
from speech.specasr.vocabulary import Vocabularies

# What an algorithm is: it asks for forward passes and ends with a draft.
Drafting = Generator[Feed, list[Prediction], DraftTree]


@dataclass
class Counters:
    """Totals since start.

    Attributes:
        rounds: drafts that were asked for and not empty.
        draft_steps: forward passes of the draft decoder.
        decoded_tokens: tokens that the draft model decoded anew, one after the other.
        recycled_tokens: tokens taken over from an earlier draft.
        predicted_tokens: the target's tokens on the drafts' trunks.
        proposed_nodes: the target's tokens on the whole trees.
        accepted_tokens: the draft model's tokens that the target confirmed.
        encoder_seconds, decoder_seconds: of the draft model, drafting's own work included.
    """

    rounds: float = 0
    draft_steps: float = 0
    decoded_tokens: float = 0
    recycled_tokens: float = 0
    predicted_tokens: float = 0
    proposed_nodes: float = 0
    accepted_tokens: float = 0
    encoder_seconds: float = 0
    decoder_seconds: float = 0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass
class DraftSession:
    """One request: what the target committed, and what was drafted for it.

    Attributes:
        chain: the draft model's tokens with their K and V; None until the audio is encoded.
        proposed: the tree of the last round.
        since: the target's tokens committed after it.
    """

    transcript: Transcript
    options: SpecASROptions
    chain: Chain | None = None
    proposed: TargetTree | None = None
    since: list[int] = field(default_factory=list)


class SpecASR:
    """The draft model's side of SpecASR (arXiv 2507.18181, sections IV and V).

    Args:
        model: the draft model.
        vocabularies: the target's and the draft model's.
    """

    def __init__(self, model: DraftWhisper, vocabularies: Vocabularies) -> None:
        self.model = model
        self.vocabularies = vocabularies
        self.counters = Counters()

    def open(self, prompt: Sequence[int], options: SpecASROptions) -> DraftSession:
        """A session for a request with the target's tokens `prompt`; `encode` comes next."""
        return DraftSession(Transcript(self.vocabularies, prompt), options)

    def encode(self, sessions: Sequence[DraftSession], features: Sequence[torch.Tensor]) -> None:
        """Run the encoder for each session's audio.

        Args:
            features: float32 [mel_bins, frames] for each session (DraftWhisper.encode).
        """
        start = time.perf_counter()
        for session, mels in zip(sessions, features, strict=True):
            if session.transcript.can_draft:
                session.chain = Chain(self.model.encode(mels))
        self.counters.encoder_seconds += time.perf_counter() - start

    def commit(self, session: DraftSession, tokens: Sequence[int]) -> None:
        """The target has committed `tokens`."""
        session.transcript.append(tokens)
        session.since += tokens

    def foresee(self, sessions: Sequence[DraftSession], max_nodes: int) -> list[TargetTree]:
        """A trunk for each session before its first token, for `verified`; empty: none."""
        start = time.perf_counter()
        drafting: dict[int, Drafting] = {}
        for i, session in enumerate(sessions):
            wanted = max_nodes > 0 and session.transcript.can_draft
            if wanted and session.options.uses_feedback and session.chain is not None:
                drafting[i] = self._foresight(session, session.chain, max_nodes)
        drafts = self._run_safely(sessions, drafting)
        trees = self._to_target(sessions, drafts, max_nodes)
        self.counters.decoder_seconds += time.perf_counter() - start
        return trees

    def verified(self, session: DraftSession, predicted: Sequence[int]) -> None:
        """The target has verified the best nodes of the last tree; `commit` comes next.

        Args:
            predicted: the target's token after the root, then after each of these nodes.
        """
        chain, tree = session.chain, session.proposed
        if chain is None or tree is None or not session.options.uses_feedback:
            return
        chain.choices[chain.start] = predicted[0]
        chain.certain = chain.start + 1
        right = {-1: predicted[0]}  # what the target says behind each node that it confirmed
        for node, token in zip(range(len(tree)), predicted[1:], strict=False):
            end, parent = int(tree.ends[node]), int(tree.parents[node])
            if right.get(parent) == tree.tokens[node]:
                right[node] = token
            if end >= 0:
                chain.choices[chain.start + end + 1] = token
                if node in right:
                    chain.certain = chain.start + end + 2

    def close(self, session: DraftSession) -> None:
        """The request is over; the session is not used again."""
        self._count_accepted(session)
        session.chain = None

    def propose(self, sessions: Sequence[DraftSession], max_nodes: int) -> list[TargetTree]:
        """A draft for each session, of at most `max_nodes` of the target's tokens.

        Empty where there is nothing to draft with: no audio, a language that the draft model does
        not know, or an output longer than its positions.
        """
        start = time.perf_counter()
        for session in sessions:
            self._count_accepted(session)
        drafting: dict[int, Drafting] = {}
        for i, session in enumerate(sessions):
            if max_nodes > 0 and session.chain is not None and session.transcript.can_draft:
                drafting[i] = self._algorithm(session, session.chain, max_nodes)
        drafts = self._run_safely(sessions, drafting)
        trees = self._to_target(sessions, drafts, max_nodes)
        for tree in trees:
            self.counters.rounds += len(tree) > 0
            self.counters.predicted_tokens += tree.trunk
            self.counters.proposed_nodes += len(tree)
        self.counters.decoder_seconds += time.perf_counter() - start
        return trees

    def _to_target(
        self, sessions: Sequence[DraftSession], drafts: dict[int, DraftTree], max_nodes: int
    ) -> list[TargetTree]:
        trees = []
        for i, session in enumerate(sessions):
            draft = drafts.get(i, DraftTree())
            tree = to_target(draft, session.transcript, self.vocabularies, max_nodes)
            session.proposed = tree
            trees.append(tree)
        return trees

    def _foresight(self, session: DraftSession, chain: Chain, max_nodes: int) -> Drafting:
        length = min(session.options.trunk_length, max_nodes)
        room = self.model.max_positions - 1
        return foresee_trunk(chain, session.transcript, self.vocabularies, length, room)

    def _algorithm(self, session: DraftSession, chain: Chain, max_nodes: int) -> Drafting:
        options, transcript = session.options, session.transcript
        room = self.model.max_positions - 1
        if options.mode == "fixed" and options.beams > 1:
            return draft_beams(chain, transcript, self.vocabularies, options, room)
        if options.mode == "tsp":
            return draft_sparse_tree(chain, transcript, self.vocabularies, options, room, max_nodes)
        return draft_trunk(chain, transcript, self.vocabularies, options, room)

    def _run_safely(
        self, sessions: Sequence[DraftSession], drafting: dict[int, Drafting]
    ) -> dict[int, DraftTree]:
        try:
            return self._run(sessions, drafting)
        except BaseException:
            # Half a forward pass may be in the caches.
            for session in sessions:
                if session.chain is not None:
                    session.chain.reset()
            raise

    def _run(
        self, sessions: Sequence[DraftSession], drafting: dict[int, Drafting]
    ) -> dict[int, DraftTree]:
        """Advance all drafts together: a forward pass runs what every one of them asks for."""
        drafts: dict[int, DraftTree] = {}
        answers: dict[int, list[Prediction] | None] = dict.fromkeys(drafting)
        while answers:
            feeds: dict[int, Feed] = {}
            for i, answer in answers.items():
                try:
                    feeds[i] = next(drafting[i]) if answer is None else drafting[i].send(answer)
                except StopIteration as end:
                    drafts[i] = end.value
            if not feeds:
                break
            caches = [_cache(sessions[i]) for i in feeds]
            predictions = self.model.step(caches, list(feeds.values()))
            answers = dict(zip(feeds, predictions, strict=True))
            self.counters.draft_steps += 1
        for i in drafts:
            chain = sessions[i].chain
            if chain is not None:
                self.counters.decoded_tokens += chain.decoded
                self.counters.recycled_tokens += chain.recycled
                chain.decoded = chain.recycled = 0
        return drafts

    def _count_accepted(self, session: DraftSession) -> None:
        tree = session.proposed
        if tree is not None and len(tree):
            covered = 0
            node = -1
            for token in session.since:
                children = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
                if not len(children):
                    break
                node = int(children[0])
                covered = int(tree.covered[node])
            self.counters.accepted_tokens += covered
        session.proposed = None
        session.since.clear()


def _cache(session: DraftSession) -> DraftCache:
    assert session.chain is not None  # only such sessions draft
    return session.chain.cache
