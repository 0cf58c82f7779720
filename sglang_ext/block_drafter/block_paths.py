"""From a block's places to the paths that may follow: a search with the drafter's path head.

Places are predicted at once; which token stands at one depends on those chosen before it. The
search goes from place to place for a whole batch, behind each request's likeliest paths (a beam).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import relu

from sglang_ext.block_drafter.kept_tokens import UNKNOWN
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.served_layers import linear_of, normed
from sglang_ext.tree import NO_PARENT

Rows = npt.NDArray[np.int64]
Logprobs = npt.NDArray[np.float32]

# A path that is less likely costs more than it brings, whatever a step takes.
_HOPELESS = math.log(0.01)


@dataclass(frozen=True)
class Paths:
    """What may follow, as a prefix tree: parents stand before their children.

    Attributes:
        rows: int64[m], rows of the embedding; UNKNOWN: a token that cannot be drafted.
        parents: int64[m], the node before each; NO_PARENT at the first place.
        logprobs: float32[m], the drafter's log-probability of each behind those before it.
        scores: float32[m], of all tokens up to each.
    """

    rows: Rows
    parents: Rows
    logprobs: Logprobs
    scores: Logprobs

    def __len__(self) -> int:
        return len(self.rows)

    def likeliest(self) -> Rows:
        """int64[k] rows, from the first place on the likeliest child of each."""
        path: list[int] = []
        at = NO_PARENT
        while len(children := np.flatnonzero(self.parents == at)):
            at = int(children[self.logprobs[children].argmax()])
            path.append(int(self.rows[at]))
        return np.array(path, dtype=np.int64)


class PathSearch:
    """Finds the likeliest paths through blocks.

    Args:
        int8: as BlockPredictor takes it.
        ends: rows of tokens behind which nothing stands.
    """

    @torch.inference_mode()
    def __init__(self, model: BlockModel, int8: bool, ends: Sequence[int]) -> None:
        head = model.path
        self._embedding, self._norm = model.embedding, head.norm
        self._of_place = linear_of(head.of_place.weight, head.of_place.bias, int8)
        self._of_earlier = linear_of(head.of_earlier.weight, None, int8)
        self._out = linear_of(head.out.weight, head.out.bias, int8)
        self._output = linear_of(model.output_weight, model.output_bias, int8)
        self._closed = np.zeros(model.embedding.num_embeddings, dtype=np.bool_)
        self._closed[[UNKNOWN, *ends]] = True

    @torch.inference_mode()
    def search(
        self, places: torch.Tensor, earlier: Rows, choices: Sequence[int], longest: int
    ) -> list[Paths]:
        """The likeliest paths of each request.

        Args:
            places: float[n, block, width], of the decoder.
            earlier: int64[n, EARLIER], rows of the last committed tokens.
            choices: of each request, how many paths are followed and how many tokens are tried
                behind each; 1: a chain.
            longest: most tokens of a path.
        """
        n, widest = len(places), max(choices)
        tried = np.arange(widest) < np.array(choices)[:, None]
        known = self._of_place(places)
        beam = _Beam(np.zeros((n, 1), np.float32), np.full((n, 1), NO_PARENT), earlier[:, None])
        found: list[_Candidates] = []
        first = 0
        for place in range(min(longest, places.shape[1])):
            rows, logprobs = self._likeliest(places[:, place], known[:, place], beam, widest)
            # A request with fewer choices than another one tries no more than it has.
            logprobs = np.where(tried[:, None, : rows.shape[2]], logprobs, -np.inf)
            candidates = beam.behind(rows, logprobs)
            found.append(candidates)
            beam = beam.next(candidates, self._closed, tried, first)
            first += candidates.rows.shape[1]
            if beam.scores.max() < _HOPELESS:
                break
        return _each(found)

    def _likeliest(
        self, places: torch.Tensor, known: torch.Tensor, beam: "_Beam", many: int
    ) -> tuple[Rows, Logprobs]:
        """int64[n, paths, many] rows behind each path, and their log-probabilities.

        Args:
            places: float[n, width].
            known: float[n, 2 width], what the path head makes of these.
        """
        earlier = torch.from_numpy(beam.earlier).to(places.device)
        tokens = normed(self._embedding(earlier), self._norm).flatten(2)
        told = self._out(relu(known[:, None] + self._of_earlier(tokens)))
        logits = self._output(places[:, None] + told).float()
        # logsumexp takes torch five times as long on a CPU
        best = logits.log_softmax(-1).topk(min(many, logits.shape[-1]))
        return best.indices.cpu().numpy() + UNKNOWN, best.values.cpu().numpy()


@dataclass(frozen=True)
class _Candidates:
    """Nodes at one place, of n requests; arrays[n, m] as Paths' of these names."""

    rows: Rows
    parents: Rows
    logprobs: Logprobs
    scores: Logprobs


@dataclass(frozen=True)
class _Beam:
    """The paths that are followed, of n requests.

    Attributes:
        scores: float32[n, paths].
        nodes: int64[n, paths], the last node of each.
        earlier: int64[n, paths, EARLIER], rows of its last tokens.
    """

    scores: Logprobs
    nodes: Rows
    earlier: Rows

    def behind(self, rows: Rows, logprobs: Logprobs) -> _Candidates:
        """The nodes behind the paths; both arrays[n, paths, tries]."""
        n, _, tries = rows.shape
        scores = (self.scores[..., None] + logprobs).reshape(n, -1)
        parents = self.nodes.repeat(tries, axis=1)
        return _Candidates(rows.reshape(n, -1), parents, logprobs.reshape(n, -1), scores)

    def next(
        self, found: _Candidates, closed: npt.NDArray[np.bool_], tried: Rows, first: int
    ) -> "_Beam":
        """The likeliest paths of one place more.

        Args:
            closed: bool[rows], behind which nothing stands.
            tried: bool[n, most paths], which each request follows.
            first: number of the first of these nodes.
        """
        open_scores = np.where(closed[found.rows], -np.inf, found.scores)
        at = np.argsort(-open_scores, axis=1, kind="stable")[:, : tried.shape[1]]
        scores = np.where(tried[:, : at.shape[1]], np.take_along_axis(open_scores, at, 1), -np.inf)
        path = at // (found.rows.shape[1] // self.nodes.shape[1])
        before = np.take_along_axis(self.earlier, path[..., None], 1)[..., 1:]
        own = np.take_along_axis(found.rows, at, 1)[..., None]
        return _Beam(scores, first + at, np.concatenate([before, own], axis=2))


def _each(found: Sequence[_Candidates]) -> list[Paths]:
    """By request, without what was not tried or is hopeless."""
    rows, parents, logprobs, scores = (
        np.concatenate([getattr(part, field.name) for part in found], axis=1)
        for field in fields(_Candidates)
    )
    return [_paths(*of_request) for of_request in zip(rows, parents, logprobs, scores, strict=True)]


def _paths(rows: Rows, parents: Rows, logprobs: Logprobs, scores: Logprobs) -> Paths:
    kept = scores >= _HOPELESS
    # A parent is likelier than its children.
    number = np.append(np.cumsum(kept) - 1, NO_PARENT)
    return Paths(rows[kept], number[parents[kept]], logprobs[kept], scores[kept])
