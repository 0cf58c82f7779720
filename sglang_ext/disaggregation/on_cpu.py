"""Prefill/decode disaggregation without a GPU: KV goes over TCP, from and to plain memory."""

import os
import time
from collections.abc import MutableMapping
from functools import cache
from typing import Any

# Only set where the user has not. Mooncake otherwise looks for RDMA and for GPUs.
_ENVIRONMENT = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}
# How long a scheduler that waits for KV leaves its core to those who compute it, in seconds.
_REST_S = 0.001


def prepare_environment(env: MutableMapping[str, str] | None = None) -> None:
    """Have Mooncake use TCP, in this process and its children."""
    env = os.environ if env is None else env
    for name, value in _ENVIRONMENT.items():
        env.setdefault(name, value)


def register() -> None:
    """Have servers copy no indices through CUDA and wait for each other without spinning.

    Once in every process. disaggregation/prefill.py makes pinned memory and CUDA events for senders
    that can wait for indices; others get them as they are.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.disaggregation.utils.get_kv_class", _got_kv_class, HookType.AFTER
    )


def _got_kv_class(made: Any, _backend: Any, kind: Any) -> None:
    if kind.value == "sender" and made is not None:
        made.supports_host_tensor_indices = False
    _rest_between_polls()  # here, because only schedulers that move KV ask for these classes


@cache
def _rest_between_polls() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.on_idle", _rest, HookType.AFTER)
    HookRegistry.apply_hooks()


def _rest(_result: None, scheduler: Any) -> None:
    """SGLang polls as fast as it can while KV is on its way, with a core that others need here."""
    if not scheduler.is_fully_idle():
        time.sleep(_REST_S)
