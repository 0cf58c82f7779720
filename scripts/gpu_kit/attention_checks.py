"""Verify steps for attention kernels, and dense attention in float32 to compare them with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from sglang_ext.cuda.flashinfer_plan import plan_from_lengths
from sglang_ext.cuda.staging import full_mask, mask_starts
from sglang_ext.tree import TokenTree, pack

# Largest error that is rounding, against the output's largest value: bfloat16 keeps 1/256.
RELATIVE_ERROR = 0.012


@dataclass
class Verify:
    """A verify step of random trees over a pool in random order.

    Attributes:
        q: [bs * width, heads, dim], bfloat16 unless asked otherwise.
        k, v: [slots, kv_heads, dim], the pool, the nodes' own rows included.
        slots: int64[len + width] of each request: where its tokens lie, the prefix first.
        mask: bool[...], the product's mask in the backends' layout.
        tree: bool[bs, width, width] on the host.
    """

    lens: list[int]
    width: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: list[torch.Tensor]
    mask: torch.Tensor
    tree: np.ndarray

    @classmethod
    def random(
        cls, lens: Sequence[int], width: int, heads: int, kv_heads: int, dim: int, device: str,
        seed: int = 0, dtype: torch.dtype = torch.bfloat16,
    ) -> "Verify":  # fmt: skip
        """Random keys, and values that make a node count as much as a long prefix does."""
        rng = np.random.default_rng(seed)
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, device=device)
            return values.to(dtype)

        packed = pack(
            list(range(len(lens))),
            [random_tree(rng, (width - 1, width // 2, 0)[i % 3]) for i in range(len(lens))],
            width,
        )
        totals = [length + width for length in lens]
        order = torch.randperm(sum(totals), generator=generator, device=device)
        slots = list(order.split(totals))
        k, v = draw(sum(totals), kv_heads, dim), draw(sum(totals), kv_heads, dim)
        for length, rows in zip(lens, slots, strict=True):
            v[rows[length:]] *= max(1.0, length / width / 4)
        tree = torch.from_numpy(packed.mask).to(device)
        counts = np.array(lens, dtype=np.int64)
        mask = full_mask(
            tree,
            torch.from_numpy(counts).to(device),
            torch.from_numpy(mask_starts(counts, width)).to(device),
            width * sum(totals),
        )
        q = draw(len(lens) * width, heads, dim)
        return cls(list(lens), width, q, k, v, slots, mask, packed.mask)

    def expected(self, request: int, tree: np.ndarray | None = None) -> torch.Tensor:
        """float32[width, heads, dim]: dense attention of one request's nodes."""
        length, rows = self.lens[request], self.slots[request]
        own = self.tree[request] if tree is None else tree
        seen = torch.ones(self.width, length + self.width, dtype=torch.bool, device=self.q.device)
        seen[:, length:] = torch.from_numpy(own).to(self.q.device)
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q[request * self.width :][: self.width].float().transpose(0, 1)
        k, v = (
            x[rows].float().repeat_interleave(group, 1).transpose(0, 1) for x in (self.k, self.v)
        )
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        scores.masked_fill_(~seen, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1)

    def errors(self, got: torch.Tensor) -> tuple[float, float]:
        """The largest error, and what one wrong bit of a tree would change, both against the
        largest output of the request it is in; `got` is bf16[bs * width, heads, dim]."""
        worst, felt = 0.0, np.inf
        for request in range(len(self.lens)):
            expected = self.expected(request)
            scale = expected.abs().max().item()
            rows = got[request * self.width :][: self.width].float()
            # An output that is not a number is as wrong as can be; max() would pass over it.
            error = (rows - expected).abs().nan_to_num(torch.inf).max().item() / scale
            worst = max(worst, error)
            flipped = self.tree[request].copy()
            flipped[self.width - 1, 0] ^= True
            other = self.expected(request, flipped)
            felt = min(felt, (other - expected).abs().max().item() / scale)
        return worst, float(felt)


def random_tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    """A tree of any shape."""
    return TokenTree(
        rng.integers(0, 100, nodes),
        np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int32),
        np.ones(nodes, dtype=np.float32),
    )


def indptr(counts: Sequence[int], device: str) -> torch.Tensor:
    """int32[n + 1], where each of `counts` begins and ends."""
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)


class FlashInferVerify:
    """FlashInfer's paged prefill wrapper as SGLang's backend uses it for verification.

    Args:
        wrapper_class: BatchPrefillWithPagedKVCacheWrapper, FlashInfer's or one with its contract.
        slots: room for a graph of the largest batch: (requests, KV rows, mask entries); None:
            without a graph.
    """

    def __init__(self, wrapper_class: type, device: str, room: tuple[int, int, int] | None = None):
        self._room = room
        workspace = torch.empty(384 << 20 if device == "cuda" else 1024, dtype=torch.uint8,
                                device=device)  # fmt: skip
        if room is None:
            self._wrapper = wrapper_class(workspace, "NHD")
            return
        requests, rows, entries = room
        integers = {"dtype": torch.int32, "device": device}
        self._wrapper = wrapper_class(
            workspace, "NHD", use_cuda_graph=True,
            qo_indptr_buf=torch.zeros(requests + 1, **integers),
            paged_kv_indptr_buf=torch.zeros(requests + 1, **integers),
            paged_kv_indices_buf=torch.zeros(rows, **integers),
            paged_kv_last_page_len_buf=torch.ones(requests, **integers),
            custom_mask_buf=torch.zeros(entries // 8 + requests, dtype=torch.uint8, device=device),
            mask_indptr_buf=torch.zeros(requests + 1, **integers),
        )  # fmt: skip

    def plan(self, step: Verify) -> None:
        """Plan a step; for a graph, one of its number of requests."""
        self._plan_with(self._wrapper.plan, step)

    def plan_from_lengths(self, step: Verify) -> None:
        """Plan a graph's step again, as the product does: the device is not waited for."""
        keys = torch.tensor([length + step.width for length in step.lens], dtype=torch.int32)
        self._plan_with(partial(plan_from_lengths, self._wrapper, keys, step.width), step)

    @staticmethod
    def _plan_with(plan: Callable[..., None], step: Verify) -> None:
        device = str(step.q.device.type)
        bs = len(step.lens)
        plan(
            indptr([step.width] * bs, device),
            indptr([length + step.width for length in step.lens], device),
            torch.cat(step.slots).to(torch.int32),
            torch.ones(bs, dtype=torch.int32, device=device),
            step.q.shape[1], step.k.shape[1], step.q.shape[2], 1,
            custom_mask=step.mask, q_data_type=step.q.dtype, kv_data_type=step.k.dtype,
        )  # fmt: skip

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[bs * width, heads, dim], by the call that SGLang's backend makes."""
        return self._wrapper.forward(q, (k, v), causal=False, sm_scale=q.shape[-1] ** -0.5)


def triton_verify(step: Verify) -> torch.Tensor:
    """SGLang's Triton extend kernel on a step: [bs * width, heads, dim]."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    device, width = str(step.q.device.type), step.width
    nodes = torch.cat([rows[n:] for rows, n in zip(step.slots, step.lens, strict=True)])
    prefix = torch.cat([rows[:n] for rows, n in zip(step.slots, step.lens, strict=True)])
    sizes = [width * (length + width) for length in step.lens]
    out = torch.empty_like(step.q)
    extend_attention_fwd(
        step.q, step.k[nodes].contiguous(), step.v[nodes].contiguous(), out, step.k, step.v,
        indptr([width] * len(step.lens), device), indptr(step.lens, device), prefix,
        step.mask, True, indptr(sizes, device).to(torch.int64), width, 1.0, 1.0,
    )  # fmt: skip
    return out
