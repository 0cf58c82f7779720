"""The target's early exit: what it is likely to say, told in the middle of its pass.

Source: Mirror speculative decoding (Bhendawade et al., 2025), section 3.1: after layer l_e the
target puts out the top-kappa of p = softmax(W_LM h) for each verified token, and goes on through
its other layers.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.runtime_context import get_parallel

from datastores import Datastore
from sglang_ext.drafters.target_reader import TargetReader, model_identity, why_not
from sglang_ext.mirror.fit_texts import ENOUGH, carried_texts, frequent_tokens, served_texts
from sglang_ext.mirror.lens import Lens
from sglang_ext.mirror.lens_fit import fitted, lens_from, lens_of
from sglang_ext.mirror.proxy import Pack, Proxy, narrowed, plain_product
from sglang_ext.mirror.target_parts import (
    ExitError,
    TargetParts,
    check_layers,
    parts_of,
    tap_state,
)
from sglang_ext.options import Options

logger = logging.getLogger(__name__)

# Gets int32[n, kappa] candidates and float32[n, kappa] log-probabilities of the rows asked for.
Told = Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32]], None]


@dataclass
class Look:
    """When a pass came to its early exit, and what that took.

    Attributes:
        reached_at: seconds of time.perf_counter; None: it did not, as it was not asked to, or the
            exit is closed.
        seconds: of the answer, handing it out included.
    """

    reached_at: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class _Wanted:
    """What the pass that runs is asked for.

    Attributes:
        rows: int64[n], of the pass's tokens; None: of all.
        total: how many tokens the pass has.
        told: gets the answer.
        look: is filled in when it does.
    """

    rows: torch.Tensor | None
    total: int
    told: Told
    look: Look


class EarlyExit:
    """Looks at a target's state behind its first layers, in passes that ask for it.

    What goes wrong in it costs the exit, never the pass: it is logged once, and the exit stays
    closed from then on.

    Args:
        proxy: what the state says.
        exit_layer: layers before the exit.

    Attributes:
        seconds: that its answers have taken, handing them out included.
        passes: in which it has answered.
    """

    def __init__(self, proxy: Proxy, exit_layer: int) -> None:
        self.proxy = proxy
        self.exit_layer = exit_layer
        self.seconds = 0.0
        self.passes = 0
        self._wanted: _Wanted | None = None
        self._end = tap_state(proxy.parts.layers, exit_layer, self._look)

    @contextmanager
    def watching(
        self, rows: npt.NDArray[np.int64] | None, total: int, told: Told
    ) -> Iterator[Look]:
        """In the pass that runs within, have `told` be called in its middle; gives its Look.

        Args:
            rows: int64[n], of the pass's tokens those that are asked about; None: all.
            total: how many tokens the pass has.
        """
        index = None if rows is None or len(rows) == total else torch.from_numpy(rows)
        self._wanted = _Wanted(index, total, told, Look())
        try:
            yield self._wanted.look
        finally:
            self._wanted = None

    def close(self) -> None:
        """Look at no pass any more."""
        self._end()

    def _look(self, state: torch.Tensor) -> None:
        wanted, self._wanted = self._wanted, None  # a pass is told of once
        if wanted is None:
            return
        began = wanted.look.reached_at = time.perf_counter()
        try:
            if len(state) != wanted.total:
                raise ExitError(f"a pass of {len(state)} tokens, {wanted.total} were expected")
            tokens, logprobs = self.proxy.candidates(
                state if wanted.rows is None else state[wanted.rows]
            )
            wanted.told(tokens.to(torch.int32).numpy(), logprobs.numpy())
        except Exception:
            logger.error("the early exit failed, and stays closed; serving goes on", exc_info=True)
            self.close()
        wanted.look.seconds = time.perf_counter() - began
        self.seconds += wanted.look.seconds
        self.passes += 1


def open_exit(
    worker: Any,
    options: Options,
    datastores: Sequence[Datastore],
    pack: Pack = plain_product,
    depth: float = 0.5,
) -> EarlyExit | None:
    """The exit of a target on the host, its lens fitted or read; None where it cannot have one.

    Call it before the first request: texts may be read, and the pools are emptied behind it.

    Args:
        worker: SGLang's TpModelWorker, its attention backend made.
        datastores: whose texts a lens may be fitted on.
        pack: makes products of few rows.
        depth: of the exit, above 0 and below 1, where the options name no layer.

    Raises:
        ExitError: the options name a layer or a file that cannot be used.
    """
    runner, config = worker.model_runner, worker.model_runner.model_config
    try:
        parts = _parts(worker)
    except ExitError as error:
        logger.warning("sglang-ext early exit: none, %s", error)
        return None
    exit_layer = options.mirror_exit_layer or layer_at(depth, len(parts.layers))
    proxy = Proxy(parts, min(options.mirror_kappa, config.vocab_size))
    texts = _texts(worker.tokenizer, datastores)
    lens = _lens(worker, options, proxy, exit_layer, texts)
    proxy = replace(proxy, lens=None if lens is None else lens.to(runner.dtype))
    if 0 < options.mirror_head_tokens < config.vocab_size:
        frequent = frequent_tokens(texts, options.mirror_head_tokens, config.vocab_size)
        try:
            proxy = narrowed(proxy, frequent, pack)
        except ValueError as error:
            raise ExitError(
                f"--mirror-head-tokens {options.mirror_head_tokens}: {error}"
            ) from error
    made = EarlyExit(proxy, exit_layer)
    logger.info(
        "sglang-ext early exit: behind layer %d of %d, %d candidates, %s",
        exit_layer,
        len(parts.layers),
        proxy.kappa,
        "the LM head alone" if proxy.lens is None else "by a lens",
    )
    return made


def layer_at(depth: float, layers: int) -> int:
    """Layers before an exit that lies so deep: 1 at least, and one less than there are at most."""
    return min(max(int(depth * layers), 1), layers - 1)


def _parts(worker: Any) -> TargetParts:
    """The target's parts.

    Raises:
        ExitError: it cannot have an exit.
    """
    runner, config = worker.model_runner, worker.model_runner.model_config
    reason = why_not(runner, worker.tokenizer)
    if get_parallel().tp_size > 1:
        reason = "the LM head is divided among ranks"
    if reason:
        raise ExitError(reason)
    parts = parts_of(runner.model, config.num_hidden_layers, config.vocab_size)
    check_layers(parts.layers)
    return parts


def _texts(tokenizer: Any, datastores: Sequence[Datastore]) -> list[list[int]]:
    served = served_texts(datastores)
    return served if sum(map(len, served)) >= ENOUGH else carried_texts(tokenizer)


def _lens(
    worker: Any, options: Options, proxy: Proxy, exit_layer: int, texts: Sequence[Sequence[int]]
) -> Lens | None:
    """The lens that the options ask for; None: the LM head by itself."""
    runner = worker.model_runner
    size = runner.model_config.hidden_size
    if options.mirror_lens == "head":
        return None
    if options.mirror_lens != "auto":
        return lens_from(options.mirror_lens, size)
    allocator, rows = runner.token_to_kv_pool_allocator, runner.req_to_token_pool.size
    reader = TargetReader(runner)

    def read(group: Sequence[Sequence[int]]) -> None:
        for at in range(0, len(group), rows):
            reader.read(group[at : at + rows])

    identity = {**model_identity(runner), "exit_layer": exit_layer, "dtype": str(runner.dtype)}
    try:
        return lens_of(
            identity,
            size,
            lambda: fitted(
                read,
                texts,
                proxy,
                exit_layer,
                options.mirror_lens_seconds,
                min(1024, allocator.available_size() // 2),
            ),
        )
    except Exception as error:
        # The paper's proxy is left; only the candidates are poorer.
        logger.warning(
            "sglang-ext lens: none, %s", error, exc_info=not isinstance(error, ExitError)
        )
        return None
    finally:
        runner.req_to_token_pool.clear()
        allocator.clear()
