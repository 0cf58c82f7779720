"""Prefill/decode disaggregation without a GPU: KV goes over TCP, from and to plain memory."""

import os
from collections.abc import MutableMapping
from typing import Any

# Only set where the user has not. Mooncake otherwise looks for RDMA and for GPUs.
_ENVIRONMENT = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}


def prepare_environment(env: MutableMapping[str, str] | None = None) -> None:
    """Have Mooncake use TCP, in this process and its children."""
    env = os.environ if env is None else env
    for name, value in _ENVIRONMENT.items():
        env.setdefault(name, value)


def register() -> None:
    """Have a prefill server copy no indices through CUDA; once in every process.

    disaggregation/prefill.py makes pinned memory and CUDA events for senders that can wait for
    indices; others get them as they are.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.disaggregation.utils.get_kv_class", _without_cuda_indices, HookType.AFTER
    )


def _without_cuda_indices(made: Any, _backend: Any, kind: Any) -> None:
    if kind.value == "sender" and made is not None:
        made.supports_host_tensor_indices = False
