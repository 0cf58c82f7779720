"""Phase 2: the kernels of a verify step against references that share nothing with them."""

import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from scripts.gpu_kit.attention_checks import (
    RELATIVE_ERROR,
    FlashInferVerify,
    Verify,
    random_tree,
    triton_verify,
)
from scripts.gpu_kit.kit import Part
from sglang_ext.tree import PackedTrees, pack, walk

# (requests, KV entries of each before the step), shorter ones among them.
GPU_STEPS = ((1, 500), (4, 2000), (16, 1000), (64, 700), (4, 8000), (1, 32_000))
CPU_STEPS = ((1, 37), (4, 70))
WIDTHS, CPU_WIDTHS = (4, 8, 16, 32), (8,)


def attention(part: Part) -> None:
    """FlashInfer and Triton under our tree masks against dense attention."""
    if part.kit.emulated:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    shape = part.kit.shape
    heads = shape.heads, shape.kv_heads, shape.head_dim
    wrapper = _wrapper(part)
    for requests, length in CPU_STEPS if part.kit.emulated else GPU_STEPS:
        for width in CPU_WIDTHS if part.kit.emulated else WIDTHS:
            lens = [max(5, length - 13 * n) for n in range(requests)]
            step = Verify.random(lens, width, *heads, part.kit.device, seed=requests)
            name = f"requests {requests}, prefix {length}, width {width}"
            with part.attempt(f"flashinfer eager, {name}"):
                kernel = FlashInferVerify(wrapper, part.kit.device)
                _judge(
                    part, f"flashinfer eager, {name}", step, lambda k=kernel, s=step: _eager(k, s)
                )
            if width == 16 or part.kit.emulated:
                with part.attempt(f"flashinfer graph, padded, {name}"):
                    _judge(
                        part,
                        f"flashinfer graph, padded, {name}",
                        step,
                        lambda s=step: _padded(part, wrapper, s),
                    )
            if part.kit.emulated:  # Triton's interpreter has no bfloat16
                step = Verify.random(lens, width, *heads, "cpu", requests, torch.float32)
            with part.attempt(f"triton, {name}"):
                _judge(part, f"triton, {name}", step, lambda s=step: triton_verify(s))
    if part.kit.emulated:
        part.not_run("CUDA graph", "plan and buffers of a graph ran; capture needs a GPU")
        part.not_run("FlashInfer's kernels", "its wrappers were emulated in torch")


def _wrapper(part: Part) -> type:
    if part.kit.emulated:
        from scripts.emulation import flashinfer_wrappers

        return flashinfer_wrappers.BatchPrefillWithPagedKVCacheWrapper
    import flashinfer

    return flashinfer.BatchPrefillWithPagedKVCacheWrapper


def _judge(part: Part, case: str, step: Verify, run: Any) -> None:
    start = time.perf_counter()
    got = run()
    seconds = time.perf_counter() - start
    error, felt = step.errors(got)
    part.result(
        case,
        error <= RELATIVE_ERROR < felt,
        relative_error=error,
        one_wrong_bit_changes=felt,
        dtype=str(step.q.dtype),
        first_call_s=round(seconds, 3),
    )


def _eager(kernel: FlashInferVerify, step: Verify) -> torch.Tensor:
    kernel.plan(step)
    return kernel.run(step.q, step.k, step.v)


def _padded(part: Part, wrapper: type, step: Verify) -> torch.Tensor:
    """The step in a graph captured for twice as many requests, the rest of them one token long.

    It is planned from the host's lengths, as the product plans a replay.
    """
    bs, width = len(step.lens), step.width
    lens = [*step.lens, *[1] * bs]
    device = part.kit.device
    totals = [length + width for length in lens]
    pad = [torch.zeros(1 + width, dtype=torch.int64, device=device)] * bs
    padding_mask = torch.ones(bs * width * (1 + width), dtype=torch.bool, device=device)
    whole = Verify(
        lens, width, torch.cat([step.q, torch.zeros_like(step.q)]), step.k, step.v,
        [*step.slots, *pad], torch.cat([step.mask, padding_mask]), step.tree,
    )  # fmt: skip
    room = (2 * bs, sum(totals) + 64, width * (sum(totals) + 64))
    kernel = FlashInferVerify(wrapper, device, room)
    short = Verify(
        [1] * (2 * bs), width, whole.q, step.k, step.v, [*pad, *pad],
        torch.cat([padding_mask, padding_mask]), step.tree,
    )  # fmt: skip
    kernel.plan(short)
    if part.kit.emulated:
        kernel.run(whole.q, step.k, step.v)
        kernel.plan_from_lengths(whole)
        return kernel.run(whole.q, step.k, step.v)[: bs * width]
    kernel.run(whole.q, step.k, step.v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.run(whole.q, step.k, step.v)
    kernel.plan_from_lengths(whole)
    graph.replay()
    return out[: bs * width]


def acceptance(part: Part) -> None:
    """The mask kernel, the tree walk and the KV move, against the host's own."""
    with part.attempt("mask"):
        _masks(part)
    for bs in (1, 3, 64):
        with part.attempt(f"walk, requests {bs}"):
            _walks(part, bs)
    with part.attempt("kv move"):
        _moves(part)
    if part.kit.emulated:
        part.not_run("verify_tree_greedy", "a JIT kernel for CUDA; the walk ran on the CPU's")


def _masks(part: Part) -> None:
    wrong = 0
    for seed, lens in enumerate(([5], [37, 1, 200], [100 + n for n in range(48)])):
        on_host = Verify.random(lens, 16, 1, 1, 8, "cpu", seed=seed)
        there = Verify.random(lens, 16, 1, 1, 8, part.kit.device, seed=seed)
        wrong += int((on_host.mask != there.mask.cpu()).sum())
    part.result("mask", wrong == 0, wrong_entries=wrong)


def _random_steps(bs: int, width: int, seed: int) -> tuple[PackedTrees, np.ndarray]:
    """Packed random trees and the target's tokens, which often follow them."""
    rng = np.random.default_rng([seed, bs])
    trees = [random_tree(rng, int(rng.integers(0, width))) for _ in range(bs)]
    packed = pack(rng.integers(0, 100, bs).tolist(), trees, width)
    predicted = rng.integers(0, 100, (bs, width))
    for row, node in zip(*np.nonzero(rng.random((bs, width)) < 0.7), strict=True):
        child = packed.next_token[row, node]
        if child >= 0:
            predicted[row, node] = packed.tokens[row, child]
    return packed, predicted


def _walks(part: Part, bs: int) -> None:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    width, device = 16, part.kit.device
    wrong, longest = 0, 0
    for seed in range(8):
        packed, predicted = _random_steps(bs, width, seed)
        index, lens = walk(packed.tokens, packed.next_token, packed.next_sibling, predicted)

        def there(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(torch.int64).to(device)

        _, accepted, correct = verify_tree_greedy_func(
            predicts=torch.zeros(bs * width, dtype=torch.int32, device=device),
            accept_index=torch.full((bs, width), -1, dtype=torch.int32, device=device),
            accept_token_num=torch.empty(bs, dtype=torch.int32, device=device),
            candidates=there(packed.tokens),
            retrieve_index=torch.arange(bs * width, device=device).view(bs, width),
            retrieve_next_token=there(packed.next_token),
            retrieve_next_sibling=there(packed.next_sibling),
            target_predict=there(predicted),
            topk=-1,
        )
        wrong += int((accepted.cpu().numpy() != index).any(1).sum())
        wrong += int((correct.cpu().numpy() + 1 != lens).sum())
        longest = max(longest, int(lens.max()))
    part.result(f"walk, requests {bs}", wrong == 0 and longest > 2, wrong=wrong, longest=longest)


def _moves(part: Part) -> None:
    """Accepted rows of a window come to its front, nothing else moves."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

    bs, width, device = 5, 16, part.kit.device
    packed, predicted = _random_steps(bs, width, seed=3)
    index, lens = walk(packed.tokens, packed.next_token, packed.next_sibling, predicted)
    pool = MHATokenToKVPool(
        size=400, page_size=1, dtype=torch.bfloat16, head_num=2, head_dim=64, layer_num=3,
        device=device, enable_memory_saver=False, enable_kv_cache_copy=not part.kit.emulated,
    )  # fmt: skip
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, device=device))
    before = [b.clone() for b in (*pool.k_buffer, *pool.v_buffer)]
    slots = torch.randperm(399, device=device)[: bs * width] + 1
    batch = SimpleNamespace(seq_lens=torch.zeros(bs, device=device), out_cache_loc=slots)
    move_accept_tokens_to_target_kvcache(
        batch,
        torch.from_numpy(index).to(device),
        torch.from_numpy(lens).to(device) - 1,
        SimpleNamespace(get_kvcache=lambda: pool),
    )
    wrong = 0
    flat = slots.cpu().numpy()
    for buffer, old in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
        expected = old.clone()
        for row in range(bs):
            source = flat[index[row, : lens[row]]]
            expected[torch.from_numpy(flat[row * width :][: lens[row]])] = old[
                torch.from_numpy(source)
            ]
        # Behind what is committed a window's rows are free: the kernel may write there, and to
        # the pool's row 0, which holds nothing.
        kept = np.setdiff1d(np.arange(1, len(old)), flat)
        front = np.concatenate([flat[r * width :][: lens[r]] for r in range(bs)])
        rows = torch.from_numpy(np.concatenate([kept, front])).to(device)
        wrong += int((buffer[rows] != expected[rows]).any(-1).any(-1).sum())
    part.result("kv move", wrong == 0, wrong_rows=wrong, moved=int(lens.sum()))


PARTS = {"attention": attention, "acceptance": acceptance}
