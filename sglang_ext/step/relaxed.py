"""Relaxed acceptance: SpecDec++'s rule (arXiv 2203.16487, Eqs. 6 and 7) on any drafter's trees.

At each node of a tree the target has a token of its own (its argmax, or the one that a bias makes
of it). A child passes if it holds that token, or by the rule, unless the target's own token ends
the request. A node goes on with the child behind which the longest path passes; of equally long
ones with the target's own token, then with the one that the target finds likeliest, then with the
tree's first. Where no child passes, the target's own token stands. As with a bias, the token that
a node goes on with takes the place of the target's own; the walk is the same, and behind the last
accepted node stands the target's own token.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.cpu.relaxed_tokens import relax_on_host
from sglang_ext.tree import PackedTrees, TokenTree

if TYPE_CHECKING:
    from sglang_ext.step.request_table import RunningRequest

_NO_TOKEN = -1
MOST_LOGITS = 1 << 24
"""Logits that are copied at a time: a large batch's would take as much memory again."""


@dataclass(frozen=True)
class RelaxedNodes:
    """The drafted nodes of a step that a relaxed rule may accept.

    Attributes:
        parents: int64[m], where the row of logits is that each node's token follows.
        places: int64[m], where the row of logits is that follows each node; a node's parent is one
            of those before it.
        tokens: int64[m].
        logprobs: float32[m], the drafter's log-probability of each; NaN: the target's counts.
        top_betas: int64[m].
        taus: float32[m], in nats.
        ends: int64[m, k], the tokens that end each node's request; -1: none.
        by_drafter: whether any of `logprobs` is a number.
        levels: the longest path from a root has so many nodes.
    """

    parents: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor
    top_betas: torch.Tensor
    taus: torch.Tensor
    ends: torch.Tensor
    by_drafter: bool
    levels: int

    def __len__(self) -> int:
        return len(self.parents)

    def part(self, index: slice) -> "RelaxedNodes":
        """Some of them."""
        return RelaxedNodes(
            self.parents[index], self.places[index], self.tokens[index], self.logprobs[index],
            self.top_betas[index], self.taus[index], self.ends[index], self.by_drafter, self.levels,
        )  # fmt: skip

    def with_rows(self, nodes: npt.NDArray[np.int64]) -> "RelaxedNodes":
        """The same where logits have rows of the flat indices `nodes` (ascending) alone."""
        parents, places = (
            torch.from_numpy(np.searchsorted(nodes, at.numpy()))
            for at in (self.parents, self.places)
        )
        return dataclasses.replace(self, parents=parents, places=places)


@dataclass(frozen=True)
class _Drafted:
    """One request's nodes: the rows of logits that their tokens follow, and that follow them, the
    tokens, and log-probabilities (None: the drafter has none)."""

    of: "RunningRequest"
    parents: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32] | None


@dataclass(frozen=True)
class Relaxation:
    """RelaxedNodes on the host."""

    parents: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    top_betas: npt.NDArray[np.int64]
    taus: npt.NDArray[np.float32]
    ends: npt.NDArray[np.int64]
    levels: int

    @classmethod
    def of(cls, running: "Sequence[RunningRequest]", packed: PackedTrees) -> "Relaxation | None":
        """What of a step's trees may be accepted by relaxation, rows of logits by flat index
        (row * width + node); None: nothing."""
        parts = []
        for b, (r, n) in enumerate(zip(running, packed.sizes.tolist(), strict=True)):
            if r.relaxed is not None and n > 1:
                at = _no_doubles(packed.parents[b, :n], packed.tokens[b, :n])
                first = b * packed.width
                parents = first + packed.parents[b, at].astype(np.int64)
                logprobs = None if packed.logprobs is None else packed.logprobs[b, at]
                parts.append(_Drafted(r, parents, first + at, packed.tokens[b, at], logprobs))
        return cls._joined(parts, int(packed.depths.max()) if parts else 0)

    @classmethod
    def of_chains(
        cls,
        running: "Sequence[RunningRequest | None]",
        chains: Sequence[TokenTree],
        roots: npt.NDArray[np.int64],
    ) -> "Relaxation | None":
        """The same of chains, whose rows of logits follow that of their root; None: nothing."""
        return cls._joined(
            [
                _Drafted(r, root + at, root + 1 + at, chain.tokens, chain.logprobs)
                for r, chain, root in zip(running, chains, roots.tolist(), strict=True)
                if r is not None and r.relaxed is not None and len(at := np.arange(len(chain)))
            ],
            max(map(len, chains), default=0),
        )

    @classmethod
    def _joined(cls, parts: Sequence[_Drafted], levels: int) -> "Relaxation | None":
        if not parts:
            return None
        sizes = [len(part.tokens) for part in parts]
        rules = [part.of.relaxed for part in parts]
        ends = np.full((len(parts), max(len(p.of.ends) for p in parts)), _NO_TOKEN, np.int64)
        logprobs = np.full(sum(sizes), np.nan, dtype=np.float32)
        places = np.split(logprobs, np.cumsum(sizes)[:-1])
        for row, place, part, rule in zip(ends, places, parts, rules, strict=True):
            row[: len(part.of.ends)] = part.of.ends
            if part.logprobs is not None and rule is not None and rule.by == "drafter":
                place[:] = part.logprobs
        return cls(
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            logprobs,
            np.repeat([rule.top_beta for rule in rules if rule is not None], sizes),
            np.repeat([rule.tau for rule in rules if rule is not None], sizes).astype(np.float32),
            np.repeat(ends, sizes, axis=0),
            levels,
        )

    def arrays(self) -> list[npt.NDArray[Any]]:
        """The arrays of RelaxedNodes."""
        return [
            self.parents, self.places, self.tokens, self.logprobs, self.top_betas, self.taus,
            self.ends,
        ]  # fmt: skip

    def nodes(self, arrays: Sequence[torch.Tensor]) -> RelaxedNodes:
        """These nodes, given `arrays` as the target's tensors."""
        by_drafter = not bool(np.isnan(self.logprobs).all())
        parents, places, tokens, logprobs, top_betas, taus, ends = arrays
        return RelaxedNodes(
            parents, places, tokens, logprobs, top_betas, taus, ends, by_drafter, self.levels
        )


def _no_doubles(
    parents: npt.NDArray[np.int32], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """int64[m], a tree's nodes but for the root and those that a sibling before them equals, which
    no walk reaches."""
    keys = np.stack([parents[1:], tokens[1:]])
    return 1 + np.sort(np.unique(keys, axis=1, return_index=True)[1])


def relax(chosen: torch.Tensor, logits: torch.Tensor, relaxed: RelaxedNodes) -> torch.Tensor:
    """Put what relaxation accepts in the place of the target's own tokens, on the host.

    Args:
        chosen: int64[T], the token that each row of logits goes on with; changed in place.
        logits: float[T, vocab], penalties, bias and grammar already applied.
        relaxed: of all drafted nodes of some requests.

    Returns:
        bool[T], the rows whose token was replaced.
    """
    taken = relax_on_host(
        chosen.numpy(),
        logits.float().numpy(),
        *(
            each.numpy()
            for each in (
                relaxed.parents, relaxed.places, relaxed.tokens, relaxed.logprobs,
                relaxed.top_betas, relaxed.taus, relaxed.ends,
            )
        ),
    )  # fmt: skip
    return torch.from_numpy(taken)


def warm_up() -> None:
    """Compile `relax`, or load it from numba's cache, so that no request waits for it."""
    row = torch.zeros(1, dtype=torch.int64)
    one, nothing = torch.ones(1), torch.full((1,), torch.nan)
    nodes = RelaxedNodes(row, row + 1, row, nothing, row + 1, one, row[:, None], False, 1)
    relax(torch.ones(2, dtype=torch.int64), torch.zeros(2, 2), nodes)


def relax_on_device(
    chosen: torch.Tensor, logits: torch.Tensor, relaxed: RelaxedNodes
) -> torch.Tensor:
    """As `relax`, on any device; nothing waits for it."""
    parents, count = relaxed.parents, len(relaxed)
    own = relaxed.tokens == chosen[parents]
    ended = (chosen[parents][:, None] == relaxed.ends).any(dim=1)
    good, likely = _passing(logits, relaxed)
    passes = own | (good & ~ended)
    reach = torch.zeros_like(chosen)
    length = passes.long()
    for _ in range(relaxed.levels):
        reach = torch.zeros_like(chosen).scatter_reduce_(0, parents, length, "amax")
        length = torch.where(passes, 1 + reach[relaxed.places], 0)
    score = torch.where(own, torch.inf, likely)
    score = torch.where(passes & (length == reach[parents]), score, -torch.inf)
    best = torch.full((len(chosen),), -torch.inf, device=chosen.device)
    best.scatter_reduce_(0, parents, score, "amax")
    number = torch.arange(count, device=chosen.device)
    number = torch.where((score > -torch.inf) & (score == best[parents]), number, count)
    first = torch.full((len(chosen),), count, device=chosen.device)
    first.scatter_reduce_(0, parents, number, "amin")
    tokens = relaxed.tokens[first.clamp(max=count - 1)]
    taken = (first < count) & (tokens != chosen)
    chosen.copy_(torch.where(taken, tokens, chosen))
    return taken


def marks_of(taken: torch.Tensor, accept_index: torch.Tensor) -> torch.Tensor:
    """bool[bs, width], which of the tokens that a step commits relaxation has accepted.

    Args:
        taken: bool[bs * width], see `relax`.
        accept_index: int32[bs, width], see verify.Accepted.
    """
    return taken[accept_index.clamp(min=0).long()] & (accept_index >= 0)


def _passing(logits: torch.Tensor, relaxed: RelaxedNodes) -> tuple[torch.Tensor, torch.Tensor]:
    """bool[m], the nodes that pass Eqs. 6 and 7; float32[m], the logits of their tokens."""
    size = max(1, MOST_LOGITS // logits.shape[1])
    starts = range(0, max(1, len(relaxed)), size)
    parts = [_judged(logits, relaxed.part(slice(i, i + size))) for i in starts]
    passes, likely = zip(*parts, strict=True)
    return torch.cat(passes), torch.cat(likely)


def _judged(logits: torch.Tensor, relaxed: RelaxedNodes) -> tuple[torch.Tensor, torch.Tensor]:
    """`_passing`, in one go.

    Differences of logits are those of log-probabilities. A token that the target cannot write (a
    grammar forbids it) never passes, whatever its drafter says of it.
    """
    rows = logits[relaxed.parents].float()
    likely = rows.gather(1, relaxed.tokens[:, None])[:, 0]
    score = likely
    if relaxed.by_drafter:
        of_drafter = relaxed.logprobs + torch.logsumexp(rows, dim=-1)
        score = torch.where(relaxed.logprobs.isnan(), likely, of_drafter)
    better = (rows > score[:, None]).sum(dim=-1)
    within = rows.amax(dim=-1) - score <= relaxed.taus
    return (better < relaxed.top_betas) & within & (likely > -torch.inf), likely
