"""SpecDec: a trained block drafter predicts the next k tokens of each request in one pass.

Source: SpecDec (arXiv 2203.16487, section 3); the model and its training are in
`sglang_ext.block_drafter`. As published, the draft is one chain of k tokens. Side branches where
the block is unsure, and SSSD's nodes beside it in one tree, are ours (docs/specdec.md).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from sglang.srt.environ import envs

from sglang_ext.block_drafter.block_predictor import BlockPredictor, Read, Written
from sglang_ext.block_drafter.block_trees import block_tree
from sglang_ext.block_drafter.drafter_files import load_drafter
from sglang_ext.block_drafter.drafter_manifest import (
    BlockDrafterError,
    check_target,
    read_manifest,
    target_name,
)
from sglang_ext.block_drafter.nat_model import EARLIER
from sglang_ext.block_drafter.request_memory import RequestMemory
from sglang_ext.block_drafter.training_data import Tokens, source_of, source_span
from sglang_ext.drafters import Drafter, DrafterContext, DrafterError, DraftRequest, load
from sglang_ext.mixture import TreeMixture, warm_up
from sglang_ext.options import Options
from sglang_ext.request_options import DrafterOptions
from sglang_ext.tree import TokenTree

logger = logging.getLogger(__name__)

# The key of custom_params under which a request sets BlockOptions.
PARAMETER = "specdec"
_MOST_SOURCE_TOKENS = 1 << 16
_LONGEST_SOURCE = 1 << 16
# As --specdec-branches takes.
MOST_BRANCHES = 8
_EXPECTED = {
    "source": f"a text of at most {_LONGEST_SOURCE} characters, or at most "
    f"{_MOST_SOURCE_TOKENS} token ids",
    "retrieve": "true or false",
    "branches": f"a whole number of 1 to {MOST_BRANCHES}",
}
_Token = Annotated[int, Field(ge=0)]


class BlockOptions(DrafterOptions):
    """What a request may set in `custom_params.specdec`.

    Attributes:
        source: the text or the token ids that the drafter's encoder reads; None: the prompt,
            without the template that all prompts of the training shared.
        retrieve: draft with SSSD too, in one tree; None: the server's `--specdec-retrieve`.
        branches: likeliest tokens at each place, 1 for a chain; None: `--specdec-branches`.
    """

    parameter = PARAMETER
    expected = _EXPECTED

    source: (
        Annotated[str, Field(max_length=_LONGEST_SOURCE)]
        | Annotated[tuple[_Token, ...], Field(max_length=_MOST_SOURCE_TOKENS)]
        | None
    ) = None
    retrieve: bool | None = None
    branches: Annotated[int, Field(ge=1, le=MOST_BRANCHES)] | None = None


@dataclass
class _State:
    options: BlockOptions
    retrieves: bool
    """Whether SSSD drafts too."""
    asked: bool = False
    """Whether the target's states were asked for."""
    memory: RequestMemory | None = None
    """The encoded source, and what was written; None: not yet."""
    read: int = 0
    """Tokens of the output that are in the memory."""
    retrieved: DraftRequest | None = None
    """The request as SSSD sees it; None: it was not asked."""
    mixed: tuple[int, TokenTree, TokenTree] | None = None
    """The trees that were mixed last, and how much was written then."""


class BlockDrafter(Drafter):
    """Drafts blocks with a model that was trained on the target's outputs.

    Raises:
        DrafterError: the drafter's directory is missing, damaged or another target's.
    """

    gives_logprobs = True

    def __init__(self, context: DrafterContext) -> None:
        folder = context.options.draft_model
        if not folder:
            raise DrafterError(
                "drafter specdec needs --draft-model, a directory of `drafter train`"
            )
        on_cpu = context.device == "cpu"
        try:
            loaded = load_drafter(folder, context.device)
            check_target(
                folder,
                loaded.manifest,
                target_name(context.model_path),
                context.tokenizer_fingerprint,
            )
        except BlockDrafterError as error:
            raise DrafterError(f"drafter specdec: {error}") from error
        if loaded.manifest.vocab_size > context.vocab_size:
            raise DrafterError(
                f"drafter specdec: {folder} drafts tokens of a vocabulary of "
                f"{loaded.manifest.vocab_size}, and the target's is {context.vocab_size}"
            )
        self._manifest, self._kept = loaded.manifest, loaded.kept
        self._ends = frozenset(self._manifest.ends) | context.eos_token_ids
        known = [end for end in self._ends if end < self._manifest.vocab_size]
        self._predictor = BlockPredictor(loaded.model, on_cpu, self._kept.rows(known).tolist())
        self._tokenizer = _tokenizer(context)
        self._choices = context.options.specdec_branches
        self._retrieves = context.options.specdec_retrieve
        self._retrieval = load("sssd", context)
        self._mixture = TreeMixture()
        warm_up()
        self._shares = self._manifest.states
        self._counters = {"sources": 0.0, "source_tokens": 0.0, "passes": 0.0, "blocks": 0.0}
        logger.info(
            "SpecDec drafter: %s, k %d, %s tokens, held out %s",
            folder,
            self._manifest.shape.block,
            self._manifest.outputs,
            dict(self._manifest.scores),
        )

    @staticmethod
    def check(params: Mapping[str, Any]) -> None:
        """Refuse custom_params that this drafter cannot use.

        Raises:
            ValueError: custom_params.specdec has an unknown name or a value of the wrong kind.
        """
        try:
            options = BlockOptions.parse(params.get(PARAMETER))
        except ValueError as error:
            raise ValueError(f"custom_params.{error}") from None
        if options.source is not None and _reads_target(Options.from_env().draft_model):
            raise ValueError(
                f"custom_params.{PARAMETER}.source must be left out: this server's drafter reads "
                "the target's states of the prompt"
            )
        # As in drafters/ssbd.py: SGLang's msgspec messages hold no list within an object.
        if isinstance(options.source, tuple) and not envs.SGLANG_USE_PICKLE_IPC.get():
            raise ValueError(
                f"custom_params.{PARAMETER}.source cannot be token ids while "
                "SGLANG_USE_PICKLE_IPC=0; send its text"
            )

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start: encoded sources and their tokens, decoder passes, blocks."""
        return self._counters

    def prefill(self, requests: Sequence[DraftRequest]) -> None:
        """Encode the sources of all, in one pass, where the drafter has an encoder of its own."""
        for request in requests:
            request.state = self._opened(request)
        if self._shares is None:
            self._encode(requests)

    @property
    def states_layer(self) -> int:
        """The layer behind which a drafter that shares the target's encoder reads it."""
        return 0 if self._shares is None else self._shares.layer

    def prefill_draft(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """The chain of each request's first block, before its first token.

        Where the target is the encoder, it has yet to read.
        """
        if self._shares is not None:
            return [TokenTree.empty()] * len(requests)
        self._encode([r for r in requests if self._state(r).memory is None])
        return self._drafted(requests, max_nodes, [1] * len(requests))

    def start(self, request: DraftRequest) -> None:
        """Take up a request; one that no prefill was told of is encoded in its first step."""
        if request.state is None:
            request.state = self._opened(request)

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """A tree for each, of one decoder pass for all; with SSSD's nodes where it is asked too."""
        self._encode([r for r in requests if self._state(r).memory is None])
        branches = [self._state(r).options.branches or self._choices for r in requests]
        trees = self._drafted(requests, max_nodes, branches)
        rows = [i for i, r in enumerate(requests) if self._state(r).retrieves]
        if rows:
            found = self._retrieval.propose([self._retrieved(requests[i]) for i in rows], max_nodes)
            for i, tree in zip(rows, found, strict=True):
                trees[i] = self._mixed(requests[i], trees[i], tree, max_nodes)
        return trees

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Let go of the source; the output joins SSSD's datastore, as without this drafter."""
        request.state = None
        self._retrieval.finish(request, completed)

    def _mixed(
        self, request: DraftRequest, drafted: TokenTree, retrieved: TokenTree, max_nodes: int
    ) -> TokenTree:
        """Both as one tree, after a look at what has become of the last two."""
        state, written = self._state(request), len(request.output)
        if state.mixed is not None:
            start, block, found = state.mixed
            self._mixture.note(block, found, request.output[start:])
        state.mixed = written, drafted, retrieved
        return self._mixture.mixed(drafted, retrieved, max_nodes)

    def _drafted(
        self, requests: Sequence[DraftRequest], max_nodes: int, branches: Sequence[int]
    ) -> list[TokenTree]:
        known = [i for i, r in enumerate(requests) if self._state(r).memory is not None]
        trees = [TokenTree.empty()] * len(requests)
        if not known:
            return trees
        memories = [memory for r in requests if (memory := self._state(r).memory) is not None]
        self._predictor.write(memories, [self._read(requests[i]) for i in known])
        found = self._predictor.predict(
            memories,
            [self._written(requests[i]) for i in known],
            [branches[i] for i in known],
            max_nodes,
        )
        self._counters["passes"] += 1
        self._counters["blocks"] += len(found)
        for i, paths in zip(known, found, strict=True):
            trees[i] = block_tree(paths, self._kept, max_nodes, self._ends)
        return trees

    def _written(self, request: DraftRequest) -> Written:
        output = request.output
        return Written.of_rows(self._kept.output_rows(output[-EARLIER:]), len(output))

    def _read(self, request: DraftRequest) -> Read:
        """What was written since the last time, all of it but the last token."""
        state, output, end = self._state(request), request.output, len(request.output) - 1
        first = max(state.read, end - self._manifest.shape.window)
        state.read = max(end, 0)
        if self._shares is None:
            rows = self._kept.output_rows(output[first:end])
            return Read(rows, np.arange(first, first + len(rows)))
        assert request.target_states is not None
        before = len(request.prompt)
        found = request.target_states(before + first, before + end)
        return Read(found.states.numpy(), first + found.places.numpy())

    def _encode(self, requests: Sequence[DraftRequest]) -> None:
        if not requests:
            return
        if self._shares is not None:
            for request in requests:
                self._remember(request)
            return
        sources = [self._source(r) for r in requests]
        for request, source, memory in zip(
            requests,
            sources,
            self._predictor.encode([self._kept.rows(source) for source in sources]),
            strict=True,
        ):
            self._state(request).memory = memory
            self._counters["source_tokens"] += len(source)
        self._counters["sources"] += len(requests)

    def _remember(self, request: DraftRequest) -> None:
        """Take the target's states of a source, and of what the prompt has behind it.

        Without any the block drafter is silent.
        """
        state = self._state(request)
        if state.asked or not request.output or request.target_states is None:
            return
        state.asked = True
        span = source_span(np.asarray(request.prompt, dtype=np.int32), self._manifest.source)
        found = request.target_states(span.start, len(request.prompt))
        if len(found.places):
            state.memory = self._predictor.remember(found.states, found.places)
            self._counters["sources"] += 1
            self._counters["source_tokens"] += len(found.places)

    def _source(self, request: DraftRequest) -> Tokens:
        """int32[s], what the encoder reads."""
        rule = self._manifest.source
        given = self._state(request).options.source
        if given is None or (isinstance(given, str) and self._tokenizer is None):
            return source_of(request.prompt[-_MOST_SOURCE_TOKENS:], rule)
        if isinstance(given, str):
            given = self._tokenizer(given, add_special_tokens=False)["input_ids"]
        known = [token for token in given if token < self._manifest.vocab_size]
        return np.array(known[-rule.most_tokens :], dtype=np.int32)

    def _opened(self, request: DraftRequest) -> _State:
        options = self._options(request)
        said = (options.retrieve, request.retrieve, self._retrieves)
        return _State(options, next(given for given in said if given is not None))

    def _options(self, request: DraftRequest) -> BlockOptions:
        try:
            return BlockOptions.parse(request.params.get(PARAMETER))
        except ValueError as error:
            # The HTTP layer refuses these (check); whoever comes another way has the defaults.
            logger.warning("request %s: custom_params.%s; ignored", request.rid, error)
            return BlockOptions()

    @staticmethod
    def _state(request: DraftRequest) -> _State:
        state: _State = request.state
        return state

    def _retrieved(self, request: DraftRequest) -> DraftRequest:
        state = self._state(request)
        if state.retrieved is None:
            state.retrieved = DraftRequest(
                request.rid,
                request.prompt,
                request.output,
                request.params,
                options=request.options,
            )
            self._retrieval.start(state.retrieved)
        return state.retrieved


@cache
def _reads_target(folder: str) -> bool:
    """Whether the drafter in a folder has the target for its encoder."""
    try:
        return read_manifest(folder).states is not None
    except BlockDrafterError:  # the start has told of it, or another server's folder is meant
        return False


def _tokenizer(context: DrafterContext) -> Any:
    """transformers' tokenizer of the target; None where the target's folder is not known."""
    if not context.model_path:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(context.model_path)
