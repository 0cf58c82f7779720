"""Drafts nothing: writes down the target's states of requests, for block drafters to learn from.

Loaded by `sglang-ext drafter distill --states`, which asks for it in each request. What it writes
is what `sglang_ext.block_drafter.state_log` reads.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.state_log import StateLog
from sglang_ext.drafters import Drafter, DrafterContext, DrafterError, DraftRequest
from sglang_ext.request_options import DrafterOptions
from sglang_ext.tree import TokenTree

logger = logging.getLogger(__name__)

# The key of custom_params under which a request sets RecorderOptions.
PARAMETER = "recorder"
_EXPECTED = dict.fromkeys(("number", "begin"), "a whole number of at least 0")


class RecorderOptions(DrafterOptions):
    """What a request sets in `custom_params.recorder`.

    Attributes:
        number: what its record is called.
        begin: the token of the prompt from which on states are written down.
    """

    parameter = PARAMETER
    expected = _EXPECTED

    number: Annotated[int, Field(ge=0)] = 0
    begin: Annotated[int, Field(ge=0)] = 0


class StateRecorder(Drafter):
    """Appends the states of each finished request to the folder of `--record-states`.

    Raises:
        DrafterError: there is no folder, or no layer.
    """

    def __init__(self, context: DrafterContext) -> None:
        options = context.options
        if not options.record_states or not options.record_layer:
            raise DrafterError("drafter recorder needs --record-states and --record-layer")
        self._folder, self._layer = Path(options.record_states), options.record_layer
        self._log: StateLog | None = None
        self._stopped = False
        self._counters = {"records": 0.0, "tokens": 0.0, "not_recorded": 0.0}

    @staticmethod
    def check(params: Mapping[str, Any]) -> None:
        """Refuse custom_params that this drafter cannot use.

        Raises:
            ValueError: custom_params.recorder has an unknown name or a value of the wrong kind.
        """
        try:
            RecorderOptions.parse(params.get(PARAMETER))
        except ValueError as error:
            raise ValueError(f"custom_params.{error}") from None

    @property
    def states_layer(self) -> int:
        """The layer whose states are written down."""
        return self._layer

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the start: records, tokens of them, requests without one."""
        return self._counters

    def propose(self, requests: Sequence[DraftRequest], max_nodes: int) -> list[TokenTree]:
        """Nothing."""
        return [TokenTree.empty()] * len(requests)

    def finish(self, request: DraftRequest, completed: bool) -> None:
        """Write down the states of a completed request, all but its last token's."""
        if not completed or self._stopped or request.target_states is None:
            return
        asked = RecorderOptions.parse(request.params.get(PARAMETER))
        end = len(request.prompt) + len(request.output) - 1
        found = request.target_states(asked.begin, end)
        # Of a part there is nothing to learn from: rows would stand for other tokens.
        if len(found.places) != end - asked.begin:
            self._counters["not_recorded"] += 1
            return
        try:
            self._opened(found.states.shape[1]).add(asked.number, asked.begin, found.states.numpy())
        except (OSError, BlockDrafterError) as error:
            self._stopped = True
            logger.error("no states are recorded any more in %s: %s", self._folder, error)
            return
        self._counters["records"] += 1
        self._counters["tokens"] += len(found.places)

    def _opened(self, width: int) -> StateLog:
        if self._log is None:
            self._log = StateLog(self._folder, TargetStates(self._layer, width))
        return self._log
