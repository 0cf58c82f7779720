"""Penalties, exact under speculation, on the device that has the logits.

SGLang's speculative workers apply one step's penalties to a whole tree and count only the last
token of an accepted run (`eagle_sample` in speculative/eagle_utils.py calls it "relaxed").
Here they are made from the committed output itself, and each node adds what the tokens on its
own path change, so that the tokens equal those of plain decoding.

A penalty touches the tokens that a request has written, a small part of the vocabulary. The
device therefore has a list of those for each request, with what is added to their logits, and
only these logits are read and written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.cuda.staging import to_device
from sglang_ext.step.request_table import stop_tokens
from sglang_ext.step.token_counts import Ids, TokenCounts
from sglang_ext.tree import PackedTrees

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Smallest sizes of the tables.
_FEWEST_ROWS = 4
_FEWEST_SLOTS = 256
# By how many of its last tokens a counted output is known again.
_TAIL = 32


def is_penalized(req: "Req") -> bool:
    """Whether the request's logits depend on what it has written so far."""
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def max_depth(req: "Req", output_len: int) -> int | None:
    """How deep a tree may go before min_new_tokens changes what is allowed; None: any depth."""
    remaining = req.sampling_params.min_new_tokens - output_len
    return remaining - 1 if remaining > 0 else None


@dataclass
class _Counted:
    """What is known of a penalized request; holding it keeps its identity from being reused."""

    req: "Req"
    row: int
    stops: Ids
    length: int = 0  # tokens of its output that are counted
    tail: list[int] = field(default_factory=list)  # the last of them

    def is_continued_by(self, output: Sequence[int]) -> bool:
        return list(output[self.length - len(self.tail) : self.length]) == self.tail


@dataclass(frozen=True)
class _Penalized:
    """A step's penalized requests.

    Attributes:
        at: int64[n], their rows in the batch.
        rows: int64[n], their rows in the tables.
        stop_at, stop_tokens: int64[k], the tokens that min_new_tokens forbids, and whom.
    """

    at: Ids
    rows: Ids
    stop_at: Ids
    stop_tokens: Ids


class DevicePenalties:
    """The penalties of the requests that run, kept up with what they write.

    A step sends the new tokens and its trees' paths to the device in one copy (pinned on CUDA),
    and nothing waits for the device. All calls must be on one stream. On finite logits the
    results are, bit for bit, those of SGLang's penalizers (sampling/penaltylib) driven token by
    token on the same device, applied as SamplingBatchInfo.apply_logits_bias does; but a logit of
    -0.0 without a penalty stays -0.0, where SGLang adds 0.0 to it. On CUDA, SGLang's compiled
    division by repetition penalties may round otherwise than the division here.

    Args:
        vocab_size: tokens outside of it, in outputs, trees or stop ids, are ignored.
        device: of the logits.
        max_requests: the largest batch; tables grow in powers of two up to it (a larger batch
            is served, with tables of its own size). Their other side grows with the distinct
            tokens of the longest output. Both are given back when no penalized request is left.
    """

    def __init__(self, vocab_size: int, device: str | torch.device, max_requests: int) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_requests = max_requests
        self.clear()

    def clear(self) -> None:
        """Forget every request."""
        # By the Req object's id: whoever comes back as another object is counted anew.
        self._known: dict[int, _Counted] = {}
        self._free: list[int] = []
        self._counts = TokenCounts(self._vocab_size)
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        self._additive = torch.zeros(0, 0, device=self._device)

    def forget(self, rid: str) -> None:
        """Forget a request, if it is known."""
        self._drop([key for key, known in self._known.items() if known.req.rid == rid])

    def update(self, reqs: Sequence["Req"], outputs: Sequence[Sequence[int]]) -> None:
        """Count what the batch's requests have written; forget those that are not in it.

        The other methods do it as well; it may be called before them, to have it done early.

        Args:
            reqs: the whole batch.
            outputs: each request's committed output, the root last. One that does not go on
                from what was counted of it (it is shorter, or the last 32 of the counted tokens
                are others) is counted anew.
        """
        _, fresh = self._count(reqs, outputs)
        if len(fresh[0]):
            self._write(*to_device(fresh, self._device))

    def apply_tree(
        self,
        logits: torch.Tensor,
        reqs: Sequence["Req"],
        outputs: Sequence[Sequence[int]],
        trees: PackedTrees,
    ) -> None:
        """Apply every node's penalties, its request's and its path's, in place.

        Args:
            logits: float[bs * width, vocab] on the device.
            reqs, outputs: see `update`.
            trees: of the same requests; no deeper than max_depth allows.
        """
        batch, fresh = self._count(reqs, outputs)
        if not len(batch.at):
            return
        paths = self._counts.along_paths(batch.rows, batch.at, trees)
        sent = self._send(batch, fresh, paths)
        request, tokens, additive, scale, stop_at, stop_tokens, *path_parts = sent
        nodes = torch.arange(trees.width, device=self._device)
        by_node = logits.view(len(reqs), trees.width, -1)
        base = (request[:, None, None], nodes[:, None], tokens[:, None])
        node, token, path_additive, path_scale = path_parts
        path = (node, token)
        # A path's tokens may be the request's as well: read before that is written, written after.
        on_path = _penalized(logits[path], path_additive, path_scale)
        by_node[base] = _penalized(by_node[base], additive[:, None], scale[:, None, None])
        logits[path] = on_path
        if len(batch.stop_at):
            never = logits.new_full((), float("-inf"))
            by_node[stop_at[:, None], nodes, stop_tokens[:, None]] = never

    def next_token(
        self, reqs: Sequence["Req"], outputs: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Penalties on each request's next token.

        Args:
            reqs, outputs: see `update`.

        Returns:
            additive: float32[bs, vocab], to be added to the logits.
            scaling: float32[bs, vocab], 1 where nothing is scaled
                (sampling/penaltylib/repetition_penalty.py divides positive logits by it).
        """
        batch, fresh = self._count(reqs, outputs)
        shape = (len(reqs), self._vocab_size)
        additive = torch.zeros(shape, device=self._device)
        scaling = torch.ones(shape, device=self._device)
        if not len(batch.at):
            return additive, scaling
        request, tokens, listed, scale, stop_at, stop_tokens = self._send(batch, fresh)
        additive[request[:, None], tokens] = listed
        scaling[request[:, None], tokens] = scale[:, None].expand(tokens.shape)
        if len(batch.stop_at):
            additive[stop_at, stop_tokens] = additive.new_full((), float("-inf"))
        return additive, scaling

    # On the host

    def _count(
        self, reqs: Sequence["Req"], outputs: Sequence[Sequence[int]]
    ) -> tuple[_Penalized, tuple[npt.NDArray[Any], ...]]:
        """The batch's penalized requests, and what has changed in the tables (`_write`)."""
        present = [(b, req) for b, req in enumerate(reqs) if is_penalized(req)]
        self._drop_departed(present)
        self._reserve_rows(len(present))
        at = np.array([b for b, _ in present], dtype=np.int64)
        rows, ends = np.empty_like(at), np.empty_like(at)
        new: list[int] = []
        stops: list[tuple[int, Ids]] = []
        for i, (b, req) in enumerate(present):
            output = outputs[b]
            known = self._known_as(req, output)
            if len(output) > known.length:
                new.extend(output[known.length :])
                known.length, known.tail = len(output), list(output[-_TAIL:])
            rows[i], ends[i] = known.row, len(new)
            if len(output) < req.sampling_params.min_new_tokens:
                stops.append((b, known.stops))
        tokens = np.array(new, dtype=np.int64)
        self._reserve_slots(self._counts.slots_needed(rows, ends, tokens))
        fresh = self._counts.count(rows, ends, tokens)
        return _Penalized(at, rows, *_flattened(stops)), fresh

    def _known_as(self, req: "Req", output: Sequence[int]) -> _Counted:
        known = self._known.get(id(req))
        if known is None:
            known = _Counted(req, self._free.pop(), _stop_tokens(req, self._vocab_size))
            self._known[id(req)] = known
        elif known.is_continued_by(output):
            return known
        known.length, known.tail = 0, []
        params = req.sampling_params
        self._counts.start(
            known.row,
            params.frequency_penalty,
            params.presence_penalty,
            params.repetition_penalty,
        )
        return known

    def _drop_departed(self, present: Sequence[tuple[int, "Req"]]) -> None:
        here = {id(req) for _, req in present}
        self._drop([key for key in self._known if key not in here])

    def _drop(self, keys: Sequence[int]) -> None:
        self._free.extend(self._known.pop(key).row for key in keys)
        if keys and not self._known:
            self.clear()

    def _reserve_rows(self, needed: int) -> None:
        rows, slots = self._counts.shape
        if needed > rows:
            larger = max(needed, min(_power_of_two(needed, _FEWEST_ROWS), self._max_requests))
            self._grow(larger, max(slots, _FEWEST_SLOTS))
            self._free.extend(range(rows, larger))

    def _reserve_slots(self, needed: int) -> None:
        rows, slots = self._counts.shape
        if needed > slots:
            self._grow(rows, _power_of_two(needed, _FEWEST_SLOTS))

    def _grow(self, rows: int, slots: int) -> None:
        self._counts.grow(rows, slots)
        self._tokens = _enlarged(self._tokens, rows, slots)
        self._additive = _enlarged(self._additive, rows, slots)

    # On the device

    def _send(
        self,
        batch: _Penalized,
        fresh: Sequence[npt.NDArray[Any]],
        more: Sequence[npt.NDArray[Any]] = (),
    ) -> list[torch.Tensor]:
        """Bring a step's arrays to the device in one copy, and write what is fresh.

        Returns:
            of the requests that have written anything their rows in the batch int64[n], their
            tokens and penalties (`_listed`) and repetition penalties float32[n]; then stop_at and
            stop_tokens of `batch`, and `more`.
        """
        written = self._counts.distinct[batch.rows] > 0
        at, rows = batch.at[written], batch.rows[written]
        theirs: list[npt.NDArray[Any]] = [
            at,
            rows,
            self._counts.distinct[rows],
            self._counts.repetition[rows],
        ]
        stops = [batch.stop_at, batch.stop_tokens]
        sent = to_device([*fresh, *theirs, *stops, *more], self._device)
        self._write(*sent[:3])
        request, row, distinct, scale, *rest = sent[3:]
        return [request, *self._listed(row, distinct, rows), scale, *rest]

    def _write(self, places: torch.Tensor, tokens: torch.Tensor, additive: torch.Tensor) -> None:
        self._tokens.view(-1)[places] = tokens
        self._additive.view(-1)[places] = additive

    def _listed(
        self, row: torch.Tensor, distinct: torch.Tensor, rows: Ids
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 and float32 [n, m], the tokens written by these rows' requests, and penalties.

        Rows shorter than the longest one go on with their first token.

        Args:
            row, distinct: int64[n] on the device, rows and how many tokens each has.
            rows: the same rows, on the host.
        """
        longest = int(self._counts.distinct[rows].max(initial=0))
        slots = torch.arange(longest, device=self._device)
        index = (row[:, None], slots * (slots < distinct[:, None]))
        return self._tokens[index], self._additive[index]


def _penalized(logits: torch.Tensor, additive: torch.Tensor, scaling: torch.Tensor) -> torch.Tensor:
    """SamplingBatchInfo._apply_pre_grammar_logits_transforms, in its order and its roundings."""
    logits = (logits + additive).to(logits.dtype)
    return torch.where(logits < 0, logits * scaling, logits / scaling).to(logits.dtype)


def _stop_tokens(req: "Req", vocab_size: int) -> Ids:
    """The tokens that min_new_tokens forbids at first (sampling/penaltylib/min_new_tokens.py)."""
    if req.sampling_params.min_new_tokens <= 0:
        return np.empty(0, dtype=np.int64)
    # A client names what it likes.
    inside = sorted(t for t in stop_tokens(req) if 0 <= t < vocab_size)
    return np.array(inside, dtype=np.int64)


def _flattened(stops: Sequence[tuple[int, Ids]]) -> tuple[Ids, Ids]:
    if not stops:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    at = np.repeat([b for b, _ in stops], [len(tokens) for _, tokens in stops])
    return at.astype(np.int64), np.concatenate([tokens for _, tokens in stops])


def _enlarged(table: torch.Tensor, rows: int, slots: int) -> torch.Tensor:
    larger = table.new_zeros(rows, slots)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger


def _power_of_two(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())
