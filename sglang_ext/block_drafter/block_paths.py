"""From a block's places to the paths that may follow: a search with the drafter's path head.

Places are predicted at once; which token stands at one depends on those chosen before it. The
search goes from place to place for a whole batch, behind each request's likeliest paths (a beam).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import relu

from sglang_ext.block_drafter.kept_tokens import UNKNOWN
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.served_layers import linear_of, normed
from sglang_ext.tree import NO_PARENT

Rows = npt.NDArray[np.int64]

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
    logprobs: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]

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
        self._closed = torch.tensor([UNKNOWN, *ends], device=model.slots.device)

    @torch.inference_mode()
    def search(
        self, places: torch.Tensor, earlier: torch.Tensor, choices: Sequence[int], longest: int
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
        given = torch.tensor(choices, device=places.device)
        tried = torch.arange(widest, device=places.device) < given[:, None]
        known = self._of_place(places)
        scores, nodes = places.new_zeros((n, 1)), given.new_full((n, 1), NO_PARENT)
        earlier = earlier[:, None]
        found: list[tuple[torch.Tensor, ...]] = []
        first = 0
        for place in range(min(longest, places.shape[1])):
            logits = self._logits(places[:, place], known[:, place], earlier)
            # logsumexp of what was found alone takes torch five times as long on a CPU
            best = logits.log_softmax(-1).topk(min(widest, logits.shape[-1]))
            logprobs = best.values
            # A request with fewer choices than another one tries no more than it has.
            logprobs = logprobs.masked_fill(~tried[:, None, : logprobs.shape[-1]], -math.inf)
            rows = (best.indices + UNKNOWN).flatten(1)
            totals = (scores[..., None] + logprobs).flatten(1)
            parents = nodes.repeat_interleave(logprobs.shape[-1], 1)
            found.append((rows, parents, logprobs.flatten(1), totals))
            going_on = totals.masked_fill(torch.isin(rows, self._closed), -math.inf)
            scores, at = going_on.topk(min(widest, going_on.shape[1]))
            scores = scores.masked_fill(~tried[:, : scores.shape[1]], -math.inf)
            if float(scores.max()) < _HOPELESS:
                break
            nodes = first + at
            before = earlier.repeat_interleave(logprobs.shape[-1], 1)[:, :, 1:]
            earlier = torch.cat([before, rows[..., None]], dim=2)
            earlier = earlier.gather(1, at[..., None].expand(-1, -1, earlier.shape[2]))
            first += rows.shape[1]
        return _each(found)

    def _logits(
        self, places: torch.Tensor, known: torch.Tensor, earlier: torch.Tensor
    ) -> torch.Tensor:
        """float32[n, paths, num_classes], as `BlockModel.logits` has them.

        Args:
            places: float[n, width].
            known: float[n, 2 width], what the path head makes of these.
            earlier: int64[n, paths, EARLIER].
        """
        tokens = normed(self._embedding(earlier), self._norm).flatten(2)
        found = self._out(relu(known[:, None] + self._of_earlier(tokens)))
        return self._output(places[:, None] + found).float()


def _each(found: Sequence[tuple[torch.Tensor, ...]]) -> list[Paths]:
    """By request, without what was not tried."""
    parts = (torch.cat(part, dim=1).cpu().numpy() for part in zip(*found, strict=True))
    return [_paths(*of_request) for of_request in zip(*parts, strict=True)]


def _paths(
    rows: Rows,
    parents: Rows,
    logprobs: npt.NDArray[np.float32],
    scores: npt.NDArray[np.float32],
) -> Paths:
    kept = scores >= _HOPELESS
    # A parent is likelier than its children.
    number = np.append(np.cumsum(kept) - 1, NO_PARENT)
    return Paths(rows[kept], number[parents[kept]], logprobs[kept], scores[kept])
