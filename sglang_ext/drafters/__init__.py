"""What a source of drafts must offer, and how the worker finds it.

A drafter proposes token trees; it knows nothing of KV pools, masks or CUDA graphs. To add one,
write a class with the methods of `Drafter`, expose it under the entry-point group
`sglang_ext.drafters`, and start the server with `--drafter NAME` (docs/drafters.md has a
whole one).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sglang_ext.options import Options
from sglang_ext.request_options import NO_DRAFTER
from sglang_ext.tree import TokenTree

if TYPE_CHECKING:
    import torch

ENTRY_POINT_GROUP = "sglang_ext.drafters"


@dataclass
class DraftRequest:
    """One running request, as a drafter sees it.

    Attributes:
        rid: SGLang's id of the request, unique while it runs.
        prompt: the prompt's token ids.
        output: the committed output so far; its last token is the root of the next tree.
        params: the request's `custom_params`, for options of the drafter's own.
        features: float32[mels, frames] on the host, the log-mel features of the request's audio;
            None for a request of text.
        state: whatever the drafter wants to keep with the request; None at first.
    """

    rid: str
    prompt: Sequence[int]
    output: list[int]
    params: Mapping[str, Any] = field(default_factory=dict)
    features: "torch.Tensor | None" = None
    state: Any = None


@dataclass(frozen=True)
class Bias:
    """What a request's next tokens are biased to.

    Attributes:
        tokens: the tokens expected after its output so far, the next one first.
        beta: 0 (the target alone decides) to 1 (the expected token wherever it is possible).
    """

    tokens: Sequence[int]
    beta: float

    def check(self, vocab_size: int) -> None:
        """Raise ValueError, naming the field, if this is no bias over `vocab_size` tokens."""
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be from 0 to 1, got {self.beta}")
        if len(self.tokens) and not 0 <= min(self.tokens) <= max(self.tokens) < vocab_size:
            raise ValueError(f"tokens must be in 0..{vocab_size - 1}")

    def at_nodes(self, tree: TokenTree) -> npt.NDArray[np.int64]:
        """int64[1 + len(tree)], the token expected after the root and after each node; -1: none."""
        expected = np.full(1 + len(tree), -1, dtype=np.int64)
        on_path = 1 + np.flatnonzero(tree.path(self.tokens))
        nodes = np.concatenate([[0], on_path])[: len(self.tokens)]
        expected[nodes] = np.asarray(self.tokens[: len(nodes)], dtype=np.int64)
        return expected


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may need to know of the server it works in.

    Attributes:
        vocab_size: tokens are 0 .. vocab_size - 1.
        options: the server's sglang-ext options.
        tokenizer_fingerprint: identifies the tokenizer; stores built for another are refused.
        eos_token_ids: tokens that end an output.
        model_path: folder or hub id of the target, its tokenizer included.
        device: torch's name of the target's device, where a draft model may run as well.
    """

    vocab_size: int
    options: Options
    tokenizer_fingerprint: str = ""
    eos_token_ids: frozenset[int] = frozenset()
    model_path: str = ""
    device: str = "cpu"
    loaded: dict[str, "Drafter"] = field(default_factory=dict, compare=False)
    """The server's drafters so far, by name: see `load`."""


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts. One object serves every request of a server, from one thread.

    The calls of a request come in this order: start, then propose and observe by turns, then
    finish. An exception in any of them is logged; in propose it costs that step
    its draft, in the others the request is not drafted for any more.

    A drafter may also have
    - `prefill(requests)`: called for requests whose prompt the target is about to read, before
      start; their output is empty. Not every request passes here (retracted ones may not).
    - `prepare(requests)`: called instead when a request arrives at a decode server, while another
      server reads its prompt: what takes time at start can be done here, before the request's KV
      is there. Without it, `prefill` is called. Start follows, or nothing if the request fails.
    - `foresee(requests, max_nodes)`: called behind prefill, where a few tokens more cost the
      target little: a chain (TokenTree, maybe empty) for each request, whose output is empty.
      The target's own tokens come back through `verified`, before start.
    - `verified(request, tree, predicted)`: called between propose and observe where every verified
      node was asked: `tree` is what was verified of the proposed one, `predicted` the target's
      token after the root, then after each of its nodes, those behind a rejected one included.
    - `bias(request)`: the Bias of its next tokens, or None; asked in every step, the one that reads
      its prompt included. Changes what is written: only for requests that ask for it.
    - `take_bigrams(bigrams)`: called once before the first request, with datastores.Bigrams: the
      target's likeliest next tokens by token. Not called where the target cannot be asked.
    - `forget(namespace, name)`: called in another thread when a namespace (name None) or what one
      request contributed is deleted; namespace None: in all. Whatever a drafter keeps of finished
      requests must be gone when it returns, and what is drafted from it in the next step; not
      called for what `datastore` holds.
    - `check(params)`: raises ValueError for custom_params that it cannot use; called where the
      client gets the message. A static method.
    - `counters`: a mapping of totals since the start by name, reported as a metric.
    """

    def __init__(self, context: DrafterContext) -> None: ...

    def start(self, request: DraftRequest) -> None:
        """The request enters decoding; its output holds the first token (or more, when it
        comes back after a retraction)."""

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """A tree of at most `max_nodes` nodes for each request, best nodes first."""
        ...

    def observe(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        """`tokens` were committed; request.output already ends with them."""

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """The request left; `completed` is False if it was aborted."""


class DrafterError(ValueError):
    """A drafter's name or its answer is not usable; the message says why."""


def find(name: str) -> EntryPoint:
    """The entry point of the drafter installed as `name`.

    Raises:
        DrafterError: there is none.
    """
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in points:
        names = ", ".join([*sorted(points), NO_DRAFTER])
        raise DrafterError(f"unknown drafter {name!r}; installed: {names}")
    return points[name]


def load(name: str, context: DrafterContext) -> Drafter:
    """The server's drafter installed as `name`: made once, so that one may draft with another.

    Raises:
        DrafterError: no such entry point, or it does not load.
    """
    if name not in context.loaded:
        point = find(name)
        try:
            context.loaded[name] = point.load()(context)
        except ImportError as error:
            raise DrafterError(
                f"drafter {name!r} ({point.value}) does not load: {error}"
            ) from error
    return context.loaded[name]
