"""What a source of drafts must offer, and how the worker finds it.

A drafter proposes token trees; it knows nothing of KV pools, masks or CUDA graphs. To add one,
write a subclass of `Drafter`, expose it under the entry-point group `sglang_ext.drafters`, and
start the server with `--drafter NAME` (docs/drafters.md has a whole one).
"""
# ruff: noqa: B027 - hooks are empty on purpose: a drafter has those that it needs

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from sglang_ext.options import Options
from sglang_ext.request_options import NO_DRAFTER, RequestOptions
from sglang_ext.tree import TokenTree

if TYPE_CHECKING:
    import torch

    from datastores import Bigrams, Datastore
    from sglang_ext.mirror.exit_view import ExitView

ENTRY_POINT_GROUP = "sglang_ext.drafters"


@dataclass
class DraftRequest:
    """One running request, as a drafter sees it.

    Attributes:
        rid: SGLang's id of the request, unique while it runs.
        prompt: the prompt's token ids.
        output: the committed output so far; its last token is the root of the next tree.
        params: the request's `custom_params`, for keys of the drafter's own.
        features: float32[mels, frames] on the host, the log-mel features of the request's audio;
            None for a request of text.
        state: whatever the drafter wants to keep with the request; None at first.
        options: what of `custom_params` all drafters read alike: namespace, ingest and others.
        retrieve: whether SSSD is to draft beside a drafter that can have it do so, by the server's
            choice for this request (`--drafter auto`); None: as the drafter's own options say.
        target_states: the target's states of a part of the prompt and the output, from its first
            place in both together to behind its last, to be asked for from `start` on; the
            output's last token has yet to be read. None: the drafter asks for none
            (`Drafter.states_layer`).
    """

    rid: str
    prompt: Sequence[int]
    output: list[int]
    params: Mapping[str, Any] = field(default_factory=dict)
    features: "torch.Tensor | None" = None
    state: Any = None
    options: RequestOptions = field(default_factory=RequestOptions)
    retrieve: bool | None = None
    target_states: "Callable[[int, int], SequenceStates] | None" = None

    @property
    def deletion_name(self) -> str:
        """What its output can be deleted by: the name that it was given, or the request's id."""
        return self.options.ingest_name or self.rid


@dataclass(frozen=True)
class SequenceStates:
    """The target's residual stream at a part of a prompt and its output.

    Attributes:
        states: float16[n, hidden size] on the host, each with mean 0 and variance 1.
        places: int64[n], where in that part they lie, ascending; the others are not known.
    """

    states: "torch.Tensor"
    places: "torch.Tensor"


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


class Drafter(ABC):
    """A source of drafts: the base class of every drafter, `propose` being all that it must have.

    One object serves every request of a server. Where a hook says no other, it is called in the
    thread that runs the target. The calls of a request come in this order: `prefill` (or `prepare`)
    and `prefill_draft` as its prompt is read, `start`, then `propose`, `verified` and `observe` by
    turns, then `finish`. A hook that a class leaves out does nothing, and costs nothing.

    Nothing that a hook raises reaches the scheduler: it costs that call, the step's draft or what
    the hook would have learned. After a failure in `prefill`, `prepare`, `start` or `observe`,
    which follow a request, the drafter is told to `finish` it (not completed) and, in its next
    step, to `start` it anew with its output so far; after the third it is left alone.

    Attributes:
        gives_logprobs: whether its trees have `logprobs`, so that a request may have them judged
            (`custom_params.relaxed.by`).
    """

    gives_logprobs: ClassVar[bool] = False

    def __init__(self, context: DrafterContext) -> None:
        """Make the server's drafter.

        Raises:
            DrafterError: it cannot be used with this server; the start ends with the message.
        """

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """Draft for the next step: a tree of at most `max_nodes` nodes for each request.

        The best nodes come first: a prefix of the tree is verified. An empty tree proposes nothing.
        """

    # Of a request's life

    def prefill(self, requests: Sequence[DraftRequest]) -> None:
        """Get ready for requests whose prompts the target is about to read.

        Their output is empty, or as far as it was written before a retraction. Not every request
        passes here: `start` may be the first that is heard of one.
        """

    def prepare(self, requests: Sequence[DraftRequest]) -> None:
        """Get ready for requests whose prompts another server reads; by default as `prefill`.

        Called on decode servers when a request arrives: what takes time can be done here, before
        its KV is there. `start` follows, or nothing if the request fails on its way.
        """
        self.prefill(requests)

    def prefill_draft(
        self, requests: Sequence[DraftRequest], max_nodes: int
    ) -> Sequence[TokenTree]:
        """Draft a chain for each request, to be read behind its prompt, where it costs little.

        Called behind `prefill`, of requests whose output is empty. A chain is a TokenTree without
        branches, of at most `max_nodes` nodes, maybe empty. What the target says of it comes
        through `verified`, before `start`.
        """
        return [TokenTree.empty()] * len(requests)

    def start(self, request: DraftRequest) -> None:
        """Take up a request that enters decoding.

        Its output holds the first token, or more where it comes back after a retraction or is
        started anew after a failure.
        """

    def observe(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        """Follow a request: `tokens` were committed, and its output ends with them already."""

    def verified(self, request: DraftRequest, tree: TokenTree, predicted: Sequence[int]) -> None:
        """Learn what the target said of a draft, between `propose` and `observe`.

        Called where every verified node was asked (greedy decoding).

        Args:
            tree: what was verified of the proposed tree.
            predicted: the target's token after the root, then after each node of `tree`, those
                behind a rejected node included.
        """

    def early_exit(self, requests: Sequence[DraftRequest], view: "ExitView") -> None:
        """Take what the target's early exit says of these requests, in the middle of a pass.

        The pass waits: hand the work to another thread or process and return within a fraction of
        a millisecond. `propose` may follow in the next step, and may wait for that work.

        Args:
            view: its rows are the requests', in their order.
        """

    @property
    def uses_early_exit(self) -> bool:
        """Whether `early_exit` is to be called; by default where the class has it.

        The early exit is computed only where a drafter of the server uses it.
        """
        return overrides(self, Drafter.early_exit)

    @property
    def exit_depth(self) -> float:
        """How deep in the target its exit is best, above 0 and below 1: half by default.

        The deeper, the more it foresees, and the less time is left. `--mirror-exit-layer` goes
        before; of several drafters the earliest exit is taken.
        """
        return 0.5

    def wants_early_exit(self, request: DraftRequest) -> bool:
        """Whether `early_exit` is to be called for this request, asked in each step; default: yes.

        A pass in which no request wants it computes none.
        """
        return True

    @property
    def states_layer(self) -> int:
        """Behind so many of the target's layers its states are kept for this drafter.

        0: none are; above: `DraftRequest.target_states` gives them. On CPUs alone.
        """
        return 0

    def bias(self, request: DraftRequest) -> Bias | None:
        """Say what the request's next tokens are biased to; None: nothing.

        Asked in every step, the one that reads the request's prompt included. It changes what is
        written: only for requests that ask for it.
        """
        return None

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Let go of a request, which has its whole output.

        Args:
            completed: False if it was aborted, or is to be started anew after a failure; its state
                may then be None, or what the failed call left of it.
        """

    # Of the server's life

    @staticmethod
    def check(params: Mapping[str, Any]) -> None:
        """Refuse `custom_params` that the drafter cannot use, in the HTTP process.

        Raises:
            ValueError: with the message that the client gets.
        """

    def take_bigrams(self, bigrams: "Bigrams") -> None:
        """Take the target's likeliest next tokens by token, once, before the first request.

        Not called where the target cannot be asked.
        """

    def forget(self, namespace: str | None, name: str | None = None) -> None:
        """Forget what finished requests left, in another thread: a client has deleted it.

        Once this returns, nothing of it may be kept, and nothing drafted from it in the next step.
        What `datastore` holds is deleted there.

        Args:
            namespace: whose; None: in all namespaces.
            name: the request's `deletion_name`; None: all requests'.
        """

    def add_corpus(self, name: str, documents: Sequence[Sequence[int]]) -> int:
        """Draft from a named corpus as well, and return its number of tokens; in another thread.

        A drafter that has this has `remove_corpus` and `list_corpora` too.

        Raises:
            ValueError: it cannot be taken; the client gets the message.
        """
        return 0

    def add_bound_corpus(
        self, namespace: str, name: str, documents: Sequence[Sequence[int]]
    ) -> int:
        """As `add_corpus`, for requests of one namespace alone; `forget` of it forgets it too.

        It is listed, and removed, as NAMESPACE/NAME. A drafter without this gets no such corpora.

        Raises:
            ValueError: it cannot be taken; the client gets the message.
        """
        return 0

    def remove_corpus(self, name: str) -> None:
        """Draft from a named corpus no more; in another thread."""

    def list_corpora(self) -> dict[str, int]:
        """Count the tokens of each named corpus, by its name."""
        return {}

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start by name, reported as a metric."""
        return {}

    @property
    def datastore(self) -> "Datastore | None":
        """The datastore that the server's datastore routes and metrics are about; None: none."""
        return None


def overrides(drafter: Drafter | type[Drafter], hook: Callable[..., Any]) -> bool:
    """Whether a drafter's class has a hook of its own, as in `overrides(made, Drafter.bias)`."""
    kind = drafter if isinstance(drafter, type) else type(drafter)
    inherited = next(vars(base) for base in kind.__mro__ if hook.__name__ in vars(base))
    return inherited[hook.__name__] is not vars(Drafter)[hook.__name__]


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


def load_class(name: str) -> type[Drafter]:
    """The class of the drafter installed as `name`.

    Raises:
        DrafterError: no such entry point, it does not load, or what it names is no drafter.
    """
    point = find(name)
    try:
        made = point.load()
    except (ImportError, AttributeError) as error:
        raise DrafterError(f"drafter {name!r} ({point.value}) does not load: {error}") from error
    if not (isinstance(made, type) and issubclass(made, Drafter)):
        raise DrafterError(
            f"drafter {name!r} ({point.value}) is no drafter: it must be a class that inherits "
            f"from sglang_ext.drafters.Drafter"
        )
    if inspect.isabstract(made):
        raise DrafterError(f"drafter {name!r} ({point.value}) has no method `propose`")
    return made


def load(name: str, context: DrafterContext) -> Drafter:
    """The server's drafter installed as `name`: made once, so that one may draft with another.

    Raises:
        DrafterError: no such entry point, it does not load, or it refuses this server.
    """
    if name not in context.loaded:
        made = load_class(name)
        try:
            context.loaded[name] = made(context)
        except ImportError as error:
            raise DrafterError(f"drafter {name!r} does not load: {error}") from error
    return context.loaded[name]


def load_all(context: DrafterContext) -> dict[str, Drafter]:
    """The drafters that a server's options name, by name.

    Raises:
        DrafterError: one of them cannot be had; the message names it.
    """
    return {name: load(name, context) for name in context.options.loaded_drafters()}
