"""CUDA graphs on the CPU: SGLang's real DecodeCudaGraphRunner over a backend that runs again.

A captured graph is a list of kernels with fixed addresses: replay computes the same thing again
from what stands in the same tensors, and Python does not run. Here replay calls the captured
forward pass once more, with the attention metadata object that the backend had at capture, and
writes to the tensors that the capture returned. So what fails with a real graph for reasons of
addresses (an input that is not copied to its static buffer, tables that another width's graphs
have replaced, an output read after the next replay) fails here, too. Streams and memory pools
are not emulated.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend

from scripts.emulation import fake_streams


class RunAgainBackend(BaseCudaGraphBackend):
    """Captures a forward pass by keeping it, and replays it by calling it."""

    def __init__(self, runner: Any):
        self._runner = runner
        self._graphs: dict[Any, tuple[Callable[[], Any], Any, Any]] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        for _ in range(2):  # as FullCudaGraphBackend warms up
            forward_fn()
            if post_warmup_hook is not None:
                post_warmup_hook()
        output = forward_fn()
        metadata = self._runner.attn_backend.forward_metadata
        self._graphs[shape_key] = forward_fn, metadata, output

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._graphs

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        forward, metadata, output = self._graphs[shape_key]
        self._runner.attn_backend.forward_metadata = metadata
        _write(forward(), output)
        return output

    def cleanup(self) -> None:
        self._graphs.clear()


def _write(new: Any, output: Any) -> None:
    """Put a forward pass's tensors where the captured pass had its own."""
    for field in dataclasses.fields(output):
        old = getattr(output, field.name)
        if isinstance(old, torch.Tensor):
            old.copy_(getattr(new, field.name))


def install() -> None:
    """Let a model runner on the CPU capture and replay as one on CUDA; once in a process."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as real

    real.resolve_decode_backend = RunAgainBackend
    real.graph_capture = _graph_capture
    real.get_or_create_global_graph_capture_stream = fake_streams.Stream
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    torch.cpu.is_current_stream_capturing = lambda: False
    torch.cpu.Event = fake_streams.Event
    cuda_graph_setup.capture_decode_graph = _capture_decode_graph


@contextmanager
def _graph_capture(stream: Any = None) -> Iterator[Any]:
    yield SimpleNamespace(stream=stream)


def _capture_decode_graph(*, model_runner: Any) -> Any:
    """As cuda_graph_setup.capture_decode_graph for a target on CUDA."""
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    disabled = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    runner = None if disabled else model_runner._decode_cuda_graph_runner_cls()(model_runner)
    phase = "target_verify" if model_runner.spec_algorithm.is_speculative() else "decode"
    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0.0, capture_time=0.0)
