"""The target's states of prompts and outputs, kept beside their KV for drafters that read them.

A drafter may share the target's encoder (SpecDec's future work, arXiv 2203.16487): what it reads
of a prompt and of what was written is the target's own residual stream there, which its passes
compute anyway. States lie in slots as K and V do, and are moved with them, so that what is in the
radix cache has them too. A slot whose K and V no pass here has computed has none.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_disagg, get_memory

from sglang_ext.block_drafter.target_states import even_states
from sglang_ext.drafters import Drafter, DrafterError, SequenceStates
from sglang_ext.mirror.target_parts import ExitError, parts_of, tap_state

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker


logger = logging.getLogger(__name__)


class KeptStates:
    """The states of one layer of a target on the host, by KV slot.

    What goes wrong in keeping them costs the states, never the pass: it is logged once, and none
    are kept from then on. They are looked up in NumPy: torch's operators take several times as
    long for a few rows.

    Args:
        target: SGLang's worker, its pools made.
        layer: behind so many layers.

    Raises:
        DrafterError: this server cannot keep them; the message says why.
    """

    def __init__(self, target: "TpModelWorker", layer: int) -> None:
        runner = target.model_runner
        reason = _why_not()
        if reason:
            raise DrafterError(f"a drafter with the target's encoder is not served {reason}")
        pool, allocator = target.get_memory_pool()
        self._rows = pool.req_to_token
        config = runner.model_config
        slots = allocator.size + max(1, allocator.page_size)
        self._states = torch.empty((slots, config.hidden_size), dtype=torch.float16)
        self._known = torch.zeros(slots, dtype=torch.bool)
        self._reading: ScheduleBatch | None = None
        self._seconds = 0.0
        try:
            parts = parts_of(runner.model, config.num_hidden_layers, config.vocab_size)
            self._end = tap_state(parts.layers, layer, self._take)
        except ExitError as error:
            raise DrafterError(
                f"a drafter with the target's encoder cannot be served: {error}"
            ) from error

    @contextmanager
    def reading(self, batch: "ScheduleBatch") -> Iterator[None]:
        """The pass that runs within reads tokens into the batch's slots."""
        self._reading = batch
        try:
            yield
        finally:
            self._reading = None

    def take_seconds(self) -> float:
        """Seconds that keeping states took since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def forget(self, slots: torch.Tensor) -> None:
        """These slots hold other tokens from now on: int64[n]."""
        self._known[slots] = False

    def move(self, to: torch.Tensor, of: torch.Tensor) -> None:
        """What lay in the slots `of` lies in `to` from now on: int64[n] both."""
        self._states[to] = self._states[of]
        self._known[to] = self._known[of]

    def reader(self, req: "Req") -> Callable[[int, int], SequenceStates]:
        """Gives a running request's states of a part of its prompt and output."""
        return functools.partial(self._of, req)

    def _of(self, req: "Req", begin: int, end: int) -> SequenceStates:
        slots = self._rows[req.kv.req_pool_idx, begin:end].numpy()
        places = self._known.numpy()[slots].nonzero()[0]
        states = self._states.numpy()[slots[places]]
        return SequenceStates(torch.from_numpy(states), torch.from_numpy(places))

    def _take(self, state: torch.Tensor) -> None:
        if self._reading is None:
            return
        start = time.perf_counter()
        try:
            self._keep(state, self._reading)
        except Exception:
            logger.exception("the target's states are not kept any more; serving goes on")
            self._end()
            self._known.zero_()
        self._seconds += time.perf_counter() - start

    def _keep(self, state: torch.Tensor, batch: "ScheduleBatch") -> None:
        # As it is now: a pass with drafts behind prompts has slots of its own.
        slots = batch.out_cache_loc.numpy()
        known = len(slots) == len(state)  # else there is padding, whose rows are nobody's
        if known:
            self._states.numpy()[slots] = even_states(state).numpy()
        self._known.numpy()[slots] = known


def states_for(target: "TpModelWorker", drafters: Iterable[Drafter]) -> KeptStates | None:
    """What a server's drafters want to be kept; None: nothing.

    Raises:
        DrafterError: it cannot be kept, or two of them want different layers.
    """
    layers = {drafter.states_layer for drafter in drafters} - {0}
    if len(layers) > 1:
        raise DrafterError(f"drafters want the states behind different layers: {sorted(layers)}")
    return KeptStates(target, layers.pop()) if layers else None


def _why_not() -> str:
    """Where slots may hold tokens of which no pass here has had the states; empty: nowhere."""
    if get_disagg().disaggregation_mode == "decode":
        return "on decode servers, as another server reads their prompts"
    if get_memory().enable_hierarchical_cache:
        return "with --enable-hierarchical-cache, whose KV comes back without states"
    return ""
