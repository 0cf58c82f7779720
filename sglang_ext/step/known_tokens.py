"""Tokens that a prefill has shown beyond a request's first: kept until its first decode step."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.step.request_table import RunningRequest


@dataclass(frozen=True)
class KnownTokens:
    """What a request will write, as its prefill has shown.

    Attributes:
        first: its first token, which comes from the prefill itself; the draft had it right.
        tokens: what follows: the rest of the draft as far as it is right, and one token more.
        kv: K and V of `first` and of all `tokens` but the last, float[n, heads, size] by layer;
            empty: they stand in the request's own slots already.
        relaxed: for `first` and each of `tokens`, whether relaxation accepted it; empty: none.
    """

    first: int
    tokens: list[int]
    kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    relaxed: list[bool] = field(default_factory=list)

    def before(self, ends: Container[int]) -> "KnownTokens | None":
        """Without a last token that is one of `ends`; None if nothing is left.

        The step that follows writes it again, as its own last token: what it wrote behind the end
        would be looked through for stop strings (SGLang's Req.update_finish_state).
        """
        if self.tokens[-1] not in ends:
            return self
        kv = [(k[:-1], v[:-1]) for k, v in self.kv]
        if len(self.tokens) == 1:
            return None
        return KnownTokens(self.first, self.tokens[:-1], kv, self.relaxed[:-1])


@dataclass(frozen=True)
class KnownHead:
    """Tokens that requests get in a step before it runs, since their prefill has shown them.

    Attributes:
        tokens: int64[bs, n], zeros behind each request's own.
        lens: int32[bs], how many each request has.
        counts: the same on the host.
        relaxed: bool[bs, n], which of the tokens relaxation accepted; None: none.
    """

    tokens: torch.Tensor
    lens: torch.Tensor
    counts: list[int]
    relaxed: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        known: Sequence[KnownTokens | None],
        to_device: Callable[[Sequence[np.ndarray]], list[torch.Tensor]],
    ) -> "KnownHead":
        """The tokens of the requests of which some are known."""
        counts = [len(k.tokens) if k is not None else 0 for k in known]
        tokens = np.zeros((len(known), max(counts)), dtype=np.int64)
        for row, k in zip(tokens, known, strict=True):
            if k is not None:
                row[: len(k.tokens)] = k.tokens
        there, lens = to_device([tokens, np.array(counts, dtype=np.int32)])
        if not any(k is not None and any(k.relaxed) for k in known):
            return cls(there, lens, counts)
        marks = np.zeros(tokens.shape, dtype=bool)
        for row, k in zip(marks, known, strict=True):
            if k is not None and k.relaxed:
                row[: len(k.tokens)] = k.relaxed[1:]
        return cls(there, lens, counts, *to_device([marks]))

    def joined(
        self, tokens: torch.Tensor, lens: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """These and, behind them, what the step gave; nothing waits for a device.

        Args:
            tokens: int[bs, m].
            lens: int32[bs], how many of them each request got.
            most: tokens that a request has of both together, at most.

        Returns:
            The same of both, int[bs, n + m or `most`] (zeros behind each request's own) and
            int32[bs].
        """
        total = (self.lens + lens).to(lens.dtype)
        n, m = self.tokens.shape[1], tokens.shape[1]
        width = min(n + m, most)
        at = torch.arange(width, device=tokens.device)
        before = self.lens[:, None]
        mine = torch.nn.functional.pad(self.tokens.to(tokens.dtype), (0, width - n))
        theirs = tokens.gather(1, (at - before).clamp(0, m - 1).long())
        both = torch.where(at < before, mine, theirs)
        return torch.where(at < total[:, None], both, torch.zeros_like(both)), total


class KnownTable:
    """Known tokens by request."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Req, KnownTokens]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, req: "Req", known: KnownTokens) -> None:
        """Keep what a prefill has shown of a request."""
        self._known[req.rid] = req, known

    def has(self, req: "Req") -> bool:
        """Whether anything is known of a request."""
        return self._known.get(req.rid, (None,))[0] is req

    def take(self, running: Sequence["RunningRequest"]) -> "list[KnownTokens | None]":
        """What is known of each of these requests; empty if of none anything.

        A request's first decode step is the last chance: what is not used then is forgotten.
        """
        if not self._known:
            return []
        found: list[KnownTokens | None] = []
        for r in running:
            req, known = self._known.pop(r.draft.rid, (None, None))
            fits = known is not None and req is r.req and r.draft.output == [known.first]
            found.append(known if fits else None)
        return found if any(found) else []

    def forget(self, rid: str) -> None:
        """The request ended, or its prompt is read again."""
        self._known.pop(rid, None)

    def clear(self) -> None:
        """Forget every request."""
        self._known.clear()


def right_tokens(
    draft: Sequence[int],
    predicted: Sequence[int],
    kv: Callable[[int], Any] | None = None,
    taken: Sequence[bool] = (),
) -> KnownTokens | None:
    """What of a chain behind a prompt is right; None: it was wrong at once.

    Args:
        draft: the chain.
        predicted: the target's token after the prompt, then after each token of the chain.
        kv: gives KnownTokens.kv of the chain's first n tokens.
        taken: whether each of `predicted` is what relaxation made of it; empty: none is.
    """
    right = 0
    while right < len(draft) and draft[right] == predicted[right]:
        right += 1
    if right == 0:
        return None
    return KnownTokens(
        draft[0],
        list(predicted[1 : right + 1]),
        kv(right) if kv is not None else [],
        [*taken[:right], False] if any(taken[:right]) else [],
    )
