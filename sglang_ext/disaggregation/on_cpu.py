"""Prefill/decode disaggregation without a GPU: KV goes over TCP, from and to plain memory."""

import os
import time
from collections.abc import Callable, MutableMapping
from functools import cache
from typing import Any

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import apply_hooks, hook

# How many pieces of memory may wait to be sent to one peer. A piece too many fails the whole
# transfer (kvcache-ai/Mooncake issue 4209), and with it its peer's for half a minute.
_QUEUE = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
_MOONCAKES_QUEUE = 1024
# Only set where the user has not. Mooncake otherwise looks for RDMA and for GPUs; its queue is as
# long as version 0.3.13 allows.
_ENVIRONMENT = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", _QUEUE: "65535"}
# How long a scheduler that waits for KV leaves its core to those who compute it, in seconds.
_REST_S = 0.001


def prepare_environment(env: MutableMapping[str, str] | None = None) -> None:
    """Have Mooncake use TCP, in this process and its children."""
    env = os.environ if env is None else env
    for name, value in _ENVIRONMENT.items():
        env.setdefault(name, value)


def register() -> None:
    """Have servers copy no indices through CUDA, wait without spinning and send what fits.

    Once in every process. disaggregation/prefill.py makes pinned memory and CUDA events for senders
    that can wait for indices; others get them as they are.
    """
    hook(sglang_points.KV_CLASS, _got_kv_class)


def _got_kv_class(made: Any, _backend: Any, kind: Any) -> None:
    if kind.value == "sender" and made is not None:
        made.supports_host_tensor_indices = False
    _prepare_scheduler()  # here, because only schedulers that move KV ask for these classes


@cache
def _prepare_scheduler() -> None:
    hook(sglang_points.ON_IDLE, _rest)
    hook(sglang_points.TRANSFER, _send_in_parts)
    apply_hooks()


def _send_in_parts(
    send: Callable[..., int],
    engine: Any,
    session_id: str,
    buffers: list[int],
    peer_buffer_addresses: list[int],
    lengths: list[int],
) -> int:
    """Never more pieces at once than Mooncake's queue takes.

    A prompt has as many as K and V have layers, times the stretches of its pool that its tokens
    lie in: 60 for SmolLM2 where they lie side by side, 60 a token where they do not at all.
    """
    most = _pieces_at_once()
    for start in range(0, len(buffers), most):
        part = slice(start, start + most)
        code = send(engine, session_id, buffers[part], peer_buffer_addresses[part], lengths[part])
        if code != 0:
            return code
    return 0


@cache
def _pieces_at_once() -> int:
    """A sending thread's share of the queue."""
    from sglang.srt.environ import envs

    queue = os.environ.get(_QUEUE, "")
    length = int(queue) if queue.isdecimal() else _MOONCAKES_QUEUE
    return max(1, length // max(1, envs.SGLANG_DISAGGREGATION_QUEUE_SIZE.get()))


def _rest(_result: None, scheduler: Any) -> None:
    """SGLang polls as fast as it can while KV is on its way, with a core that others need here."""
    if not scheduler.is_fully_idle():
        time.sleep(_REST_S)
