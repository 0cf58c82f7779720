"""From a block's places to the paths that may follow: a search with the drafter's path head.

Places are predicted at once; which token stands at one depends on those chosen before it. The
search goes from place to place for a whole batch, behind each request's likeliest paths (a beam).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import embedding_bag, linear

from sglang_ext.block_drafter import path_kernel
from sglang_ext.block_drafter.kept_tokens import UNKNOWN
from sglang_ext.block_drafter.nat_model import EARLIER, BlockModel
from sglang_ext.block_drafter.packed_linear import PackedLinear, packed
from sglang_ext.block_drafter.served_layers import linear_of, normed
from sglang_ext.tree import NO_PARENT

Rows = npt.NDArray[np.int64]
Logprobs = npt.NDArray[np.float32]

# A path that is less likely costs more than it brings, whatever a step takes.
_HOPELESS = math.log(0.01)

# Paths that are followed, as path_kernel.go_on has them.
_Beam = tuple[Rows, Rows, Logprobs, Rows]


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

    Beside the model's weights it keeps what the path head makes of each token: EARLIER x rows x 2 x
    width numbers of float32, 33 MB of 8,000 tokens and width 256.

    Args:
        int8: as BlockPredictor takes it.
        ends: rows of tokens behind which nothing stands.
    """

    @torch.inference_mode()
    def __init__(self, model: BlockModel, int8: bool, ends: Sequence[int]) -> None:
        head = model.path
        self._of_place = linear_of(head.of_place.weight, head.of_place.bias, int8)
        of_earlier = _by_row(model.embedding, head.norm, head.of_earlier)
        compiled = _Compiled.of(model, of_earlier) if int8 else None
        self._run = compiled or _Plain(model, of_earlier)
        self._closed = np.zeros(len(model.embedding.weight), dtype=np.bool_)
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
        tried, depth = np.array(choices), min(longest, places.shape[1])
        widest = int(tried.max())
        found = _Found.of(len(places), widest + (depth - 1) * widest**2)
        places = places.contiguous()
        known = self._of_place(places)
        asked = _Asked(places, known, earlier, tried, depth, _HOPELESS, self._closed)
        self._run(asked, found)
        return found.paths()


class _Asked(NamedTuple):
    """What is searched, and how far: as path_kernel.search takes it."""

    places: torch.Tensor
    known: torch.Tensor
    earlier: Rows
    choices: Rows
    depth: int
    hopeless: float
    closed: npt.NDArray[np.bool_]


class _Plain:
    """The search by torch's operators, on any device, with weights as they are."""

    def __init__(self, model: BlockModel, of_earlier: torch.Tensor) -> None:
        """of_earlier: of `_by_row`."""
        self._model, self._of_earlier = model, of_earlier.flatten(0, 1)
        self._each = of_earlier.shape[1] * np.arange(EARLIER)

    def __call__(self, asked: _Asked, found: "_Found") -> None:
        """Add to `found` what may follow; as path_kernel.search."""
        places, known, earlier, choices, depth, hopeless, closed = asked
        n = len(places)
        beam: _Beam = np.arange(n), np.full(n, NO_PARENT), np.zeros(n, np.float32), earlier
        most = min(int(choices.max()), self._model.num_classes)
        for place in range(depth):
            which = torch.from_numpy(beam[0]).to(places.device)
            logits = self._logits(places[which, place], known[which, place], beam[3])
            best = logits.log_softmax(-1).topk(most)
            rows, logprobs = best.indices.cpu().numpy() + UNKNOWN, best.values.cpu().numpy()
            beam = path_kernel.go_on(rows, logprobs, beam, choices, hopeless, closed, found)
            if not len(beam[0]):
                break

    def _logits(self, places: torch.Tensor, known: torch.Tensor, earlier: Rows) -> torch.Tensor:
        """float32[paths, num_classes], as `BlockModel.logits` has them."""
        rows = torch.from_numpy(earlier + self._each).to(places.device)
        inner = embedding_bag(rows, self._of_earlier, mode="sum") + known
        chosen = places + self._model.path.out(inner.relu_())
        return linear(chosen, self._model.output_weight, self._model.output_bias).float()


class _Compiled:
    """The search as path_kernel has it, in 8 bits."""

    def __init__(self, of_earlier: torch.Tensor, out: PackedLinear, output: PackedLinear) -> None:
        """of_earlier: of `_by_row`; out, output: the layers of these names."""
        self._of_earlier = of_earlier.numpy()
        self._out, self._output = out, output
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)

    @classmethod
    def of(cls, model: BlockModel, of_earlier: torch.Tensor) -> "_Compiled | None":
        """None where 8 bits do not fit, as `packed` has it."""
        out = packed(model.path.out.weight, model.path.out.bias)
        output = packed(model.output_weight, model.output_bias)
        return None if out is None or output is None else cls(of_earlier, out, output)

    def __call__(self, asked: _Asked, found: "_Found") -> None:
        """Add to `found` what may follow; as path_kernel.search."""
        places, known, *others = asked
        path_kernel.search(
            places.numpy(), known.numpy(), *others, self._of_earlier, self._out, self._output,
            UNKNOWN, found, self._threads,
        )  # fmt: skip


def _by_row(embedding: nn.Embedding, norm: nn.LayerNorm, of_earlier: nn.Linear) -> torch.Tensor:
    """float32[EARLIER, rows, 2 width], what each row contributes as each of the tokens before."""
    rows = normed(embedding.weight, norm)
    parts = of_earlier.weight.split(rows.shape[1], dim=1)
    return torch.stack([rows @ part.T for part in parts]).detach().contiguous()


class _Found(NamedTuple):
    """Nodes of n requests: arrays[n, most] as Paths', and int64[n] how many there are."""

    rows: Rows
    parents: Rows
    logprobs: Logprobs
    scores: Logprobs
    counts: Rows

    @classmethod
    def of(cls, requests: int, most: int) -> "_Found":
        """None yet, and room for as many of each request."""
        rows, parents = np.empty((2, requests, most), np.int64)
        logprobs, scores = np.empty((2, requests, most), np.float32)
        return cls(rows, parents, logprobs, scores, np.zeros(requests, np.int64))

    def paths(self) -> list[Paths]:
        """Of each request."""
        return [
            Paths(
                self.rows[i, :count],
                self.parents[i, :count],
                self.logprobs[i, :count],
                self.scores[i, :count],
            )
            for i, count in enumerate(self.counts.tolist())
        ]
