"""A small Whisper drafts for a large one: SpecASR (speech/specasr) as a drafter of the worker."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_ext import models
from sglang_ext.drafters import Drafter, DrafterContext, DrafterError, DraftRequest
from sglang_ext.options import Options
from sglang_ext.tree import TokenTree
from speech.specasr import DraftSession, DraftWhisper, SpecASR, SpecASROptions, Vocabularies
from speech.specasr.draft_tree import TargetTree
from speech.specasr.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

DEFAULT_DRAFT_MODEL = "whisper-tiny.en"
# The key of custom_params under which a request sets SpecASROptions.
PARAMETER = "specasr"


class WhisperDrafter(Drafter):
    """Drafts transcripts with a smaller Whisper, whose encoder runs in the target's prefill.

    A request without audio, or in a language that the draft model does not know, is not drafted
    for.

    Raises:
        DrafterError: the draft model cannot be had, or the target is no Whisper.
    """

    def __init__(self, context: DrafterContext) -> None:
        name = context.options.draft_model or DEFAULT_DRAFT_MODEL
        try:
            folder = models.resolve(name)
            vocabularies = Vocabularies(_target_vocabulary(context), Vocabulary.load(folder))
            model = DraftWhisper.load(folder, device=context.device)
        except (models.ModelError, OSError, ValueError) as error:
            raise DrafterError(f"drafter specasr, draft model {name!r}: {error}") from error
        self._defaults = server_options(context.options)
        self._specasr = SpecASR(model, vocabularies)

    @staticmethod
    def check(params: Mapping[str, Any]) -> None:
        """Refuse custom_params that this drafter cannot use.

        Raises:
            ValueError: custom_params.specasr has an unknown name or a value out of range.
        """
        try:
            SpecASROptions().merged(params.get(PARAMETER))
        except ValueError as error:
            raise ValueError(f"custom_params.{error}") from None

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since start (speech.specasr.session.Counters)."""
        return self._specasr.counters.as_dict()

    def prefill(self, requests: Sequence[DraftRequest]) -> None:
        """Run the encoder for the audio whose prompt the target is about to read."""
        for request in requests:
            request.state = self._open(request)
        self._encode(requests)

    def prefill_draft(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """A chain for each request, before its first token."""
        trees = self._specasr.foresee([request.state for request in requests], max_nodes)
        return [_token_tree(tree) for tree in trees]

    def start(self, request: DraftRequest) -> None:
        """Take the output so far: one token, or more after a retraction."""
        session = self._open(request)
        if isinstance(request.state, DraftSession):
            # Encoded already: the audio is the same, and so may be some of the draft.
            session.chain = request.state.chain
            session.proposed = request.state.proposed
        self._specasr.commit(session, request.output)
        request.state = session

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """A tree for each request."""
        self._encode(requests)
        trees = self._specasr.propose([request.state for request in requests], max_nodes)
        return [_token_tree(tree) for tree in trees]

    def verified(self, request: DraftRequest, tree: TokenTree, predicted: Sequence[int]) -> None:
        """Take the target's tokens, those behind a rejected one included."""
        proposed = request.state.proposed
        n = len(tree)
        # Where the output must end soon, nodes too deep were left out: theirs is another order.
        if proposed is not None and np.array_equal(tree.tokens, proposed.tokens[:n]):
            self._specasr.verified(request.state, predicted)

    def observe(self, request: DraftRequest, tokens: Sequence[int]) -> None:
        """Follow what the target committed."""
        self._specasr.commit(request.state, tokens)

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Let go of the request's cache."""
        if isinstance(request.state, DraftSession):
            self._specasr.close(request.state)
        request.state = None

    def _open(self, request: DraftRequest) -> DraftSession:
        try:
            options = self._defaults.merged(request.params.get(PARAMETER))
        except ValueError as error:
            # The HTTP layer refuses these (check); whoever comes another way has the defaults.
            logger.warning("request %s: custom_params.%s; ignored", request.rid, error)
            options = self._defaults
        return self._specasr.open(request.prompt, options)

    def _encode(self, requests: Sequence[DraftRequest]) -> None:
        sessions: list[DraftSession] = []
        features: list[torch.Tensor] = []
        for request in requests:
            session: DraftSession = request.state
            if session.chain is None and request.features is not None:
                sessions.append(session)
                features.append(request.features)
        if sessions:
            self._specasr.encode(sessions, features)


def server_options(options: Options) -> SpecASROptions:
    """The options of requests that set none."""
    return SpecASROptions(
        mode=options.specasr_mode,
        length=options.asp_length or None,
        threshold=options.asp_threshold,
    )


def _target_vocabulary(context: DrafterContext) -> Vocabulary:
    if not context.model_path:
        raise ValueError("the target's folder is not known, so neither is its tokenizer")
    if (Path(context.model_path) / "tokenizer.json").is_file():
        return Vocabulary.load(context.model_path)
    # A hub id, or a folder with the older vocab.json and merges.txt.
    from transformers import AutoTokenizer

    try:
        return Vocabulary.of(AutoTokenizer.from_pretrained(context.model_path))
    except KeyError:
        raise ValueError(f"the target {context.model_path} is not a Whisper model") from None


def _token_tree(tree: TargetTree) -> TokenTree:
    return TokenTree(tree.tokens, tree.parents, tree.probs) if len(tree) else TokenTree.empty()
