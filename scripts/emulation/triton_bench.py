"""SGLang's real TritonAttnBackend in Triton's interpreter, with a pool and batches of its own.

Its kernels are SGLang's too: TRITON_INTERPRET=1 runs them on the CPU. Triton reads that variable
while it is imported, so set it before.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

from scripts.emulation.attention_bench import Bench, Pool, model_runner


@contextmanager
def bench(width: int, window: int | None = None) -> Iterator[Bench]:
    """A backend of a target with full attention or with a sliding window.

    Args:
        width: nodes per request that a verify step has room for.
        window: positions that a window layer looks back.

    Raises:
        RuntimeError: Triton is not in its interpreter.
    """
    import triton

    if os.environ.get("TRITON_INTERPRET") != "1" or not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    with ExitStack() as stack:
        _publish(stack, width)
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        pool = Pool()
        runner = model_runner(pool, window, decode_num_tokens_per_req=lambda: width, gpu_id=0)
        backend = TritonAttnBackend(runner)
        yield Bench(backend, pool, runner.req_to_token_pool.req_to_token)


def _publish(stack: ExitStack, width: int) -> None:
    """The configuration that the backend reads, which only a server publishes."""
    from sglang.srt.layers.attention import triton_backend, verify_mask
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    executor = SimpleNamespace(
        dllm=SimpleNamespace(dllm_algorithm=None),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        kernel=SimpleNamespace(
            enable_lean_attention=False,
            triton_attention_num_kv_splits=4,
            triton_attention_split_tile_size=None,
        ),
    )
    speculation = SimpleNamespace(
        speculative_num_draft_tokens=width,
        speculative_num_steps=width // 2,
        speculative_eagle_topk=2,  # as the plugin sets it: trees, not chains
    )
    schedule = SimpleNamespace(chunked_prefill_size=-1)
    stack.enter_context(get_parallel().override(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0))
    for name, value in (
        ("get_exec", lambda: executor),
        ("get_spec", lambda: speculation),
        ("get_schedule", lambda: schedule),
        ("cuda_graph_fully_disabled", lambda: False),
        ("check_cuda_graph_backend", lambda *_: False),
        ("mambaish_config", lambda _: None),
        ("get_device_core_count", lambda _: 0),
    ):
        stack.enter_context(mock.patch.object(triton_backend, name, value))
    full = mock.patch.object(verify_mask, "default_tree_mask_mode", lambda: TreeMaskMode.FULL_MASK)
    stack.enter_context(full)  # as on CUDA
