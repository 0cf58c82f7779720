"""SGLang's real FlashInferAttnBackend over emulated wrappers, with a pool and batches of its own.

The backend itself, its index updaters, KVIndexTranslator and NgramVerifyInput are SGLang's.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from scripts.emulation.attention_bench import Bench, Pool, model_runner
from scripts.emulation.flashinfer import installed


@contextmanager
def bench(window: int | None = None, encoder_decoder: bool = False) -> Iterator[Bench]:
    """A backend of a target with full attention, a sliding window, or an encoder."""
    with ExitStack() as stack:
        stack.enter_context(installed(allow_float32=True))
        _publish(stack)
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        pool = Pool()
        runner = model_runner(
            pool,
            window,
            encoder_decoder,
            server_args=None,
            prefill_attention_backend_str="flashinfer",
            decode_attention_backend_str="flashinfer",
        )
        yield Bench(FlashInferAttnBackend(runner), pool, runner.req_to_token_pool.req_to_token)


def _publish(stack: ExitStack) -> None:
    """The configuration that the backend reads, which only a server publishes."""
    from sglang.srt.layers.attention import flashinfer_backend
    from sglang.srt.runtime_context import get_parallel

    executor = SimpleNamespace(
        features=SimpleNamespace(enable_mis=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    stack.enter_context(get_parallel().override(attn_tp_size=1, attn_dcp_size=1))
    for name, value in (
        ("get_exec", lambda: executor),
        ("get_cuda_graph_max_batch_size", lambda rows: rows),
        ("DllmConfig", SimpleNamespace(from_server_args=lambda _: None)),
        # A fresh workspace, which no run here writes to.
        ("get_buffer", lambda _, make: torch.zeros(16, dtype=torch.uint8)),
    ):
        stack.enter_context(mock.patch.object(flashinfer_backend, name, value))
