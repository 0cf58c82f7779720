"""Makes a server on the CPU take every decision of SGLang's and our CUDA path that it can.

What is replaced, each with its reason, is listed in `install`. Kernels, captured graphs and real
streams are what is left out: attention is emulated FlashInfer (flashinfer.py), streams are
fake_streams.py, the other kernels are those of SGLang's CPU engine.
"""

import dataclasses
import os
from types import ModuleType
from typing import Any

import torch

from scripts.emulation import fake_streams, flashinfer

# tree_cpu's flags that CUDA's server does not have.
_HOST_ONLY_FLAGS = ("--disable-overlap-schedule",)


class _TorchWithPinnedMemory(ModuleType):
    """torch, whose `empty` has pinned memory without CUDA."""

    empty = staticmethod(fake_streams.pinned_empty)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install() -> None:
    """Emulate the device in this process; once, before our plugin registers, in every process."""
    from sglang_ext import plugin
    from sglang_ext.cpu import defaults

    # The scheduler keeps its writes behind the last pass's reads, on CUDA alone by default.
    os.environ["SGLANG_ENABLE_WAR_BARRIER"] = "1"
    _install_streams()
    _take_flashinfer()
    defaults.default_cpu_args = _flags_of_a_device(defaults.default_cpu_args)
    plugin._resolve_server_args = _resolved_as_on_cuda(plugin._resolve_server_args)
    plugin._worker_class = _device_worker


def _install_streams() -> None:
    """torch.cpu is what torch.get_device_module gives the scheduler and the worker."""
    from sglang.srt.managers import overlap_utils, utils
    from sglang.srt.utils import common

    torch.cpu.Stream = fake_streams.Stream
    torch.cpu.Event = fake_streams.Event
    torch.cpu.current_stream = fake_streams.current_stream
    torch.cpu.StreamContext = fake_streams.StreamContext
    torch.cpu.stream = fake_streams.StreamContext
    common.async_d2h = fake_streams.async_d2h
    utils._async_d2h = fake_streams.async_d2h
    # Lengths come to the host through pinned memory and a stream of their own.
    overlap_utils._is_cuda = True
    overlap_utils.torch = _TorchWithPinnedMemory("torch")


def _take_flashinfer() -> None:
    # In float64, so that rows hardly depend on how many are computed beside them.
    flashinfer.install(allow_float32=True, compute_dtype=torch.float64)


def _flags_of_a_device(original: Any) -> Any:
    def flags(argv: list[str], weights: str = "fp32") -> list[str]:
        added = original([*argv, "--attention-backend", "flashinfer"], weights)
        return [flag for flag in added if flag not in _HOST_ONLY_FLAGS] + _flashinfer_flag(argv)

    return flags


def _flashinfer_flag(argv: list[str]) -> list[str]:
    given = any(flag.split("=")[0] == "--attention-backend" for flag in argv)
    return [] if given else ["--attention-backend", "flashinfer"]


def _resolved_as_on_cuda(original: Any) -> Any:
    """plugin.py's resolution of the arguments, with what it does on CUDA behind that of the CPU."""

    def resolve(server_args: Any) -> None:
        from sglang.srt.arg_groups.overrides import resolving_view

        from sglang_ext.cuda import backends

        off = resolving_view(server_args).disable_overlap_schedule
        original(server_args)
        server_args.disable_overlap_schedule = off
        facts_of = backends.facts_of

        def facts(*args: Any) -> Any:
            # Compared token by token, it computes in float32, which only the emulation has.
            return dataclasses.replace(facts_of(*args), float32=False)

        backends.facts_of = facts  # type: ignore[assignment]
        try:
            backends.resolve_backends(server_args)
        finally:
            backends.facts_of = facts_of

    return resolve


def _device_worker(server_args: Any) -> type:
    """Our worker, on a device."""
    from sglang_ext import worker

    worker.runs_on_host = lambda device: False  # type: ignore[assignment]
    return worker.SpeculativeWorker
