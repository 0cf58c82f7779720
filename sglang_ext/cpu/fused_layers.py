"""Decoders of Llama's and Qwen2's kind, fused on CPUs.

SGLang's modules call some 40 torch operators a layer, and with packed weights the calls take most
of a decode step: SmolLM2-135M in 4 bits took 45 ms a token on two cores, its products 6. Where all
of a model's layers are known here, `fused_kernel` computes them instead, as many in one call as no
hook lies between. SGLANG_EXT_CPU_FUSED_LAYERS=0 turns this off.

The residual stream goes from layer to layer as the hidden states, whole: SGLang's boundaries
(srt/layers/layer_boundary) take it as a first layer's input, which has no residual yet.
"""

import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numba
import numpy as np
import torch

from sglang_ext.cpu import fused_kernel as kernel
from sglang_ext.cpu.group_dots import GROUP
from sglang_ext.cpu.group_weights import GroupWeight
from sglang_ext.cpu.lane_vectors import LANES
from sglang_ext.cpu.layer_room import LayerRoom, Weight, columns_of
from sglang_ext.cpu.layer_rows import multiplier_of
from sglang_ext.cpu.linear import PackedLinearMethod, weights_version
from sglang_ext.cpu.rotary import covers
from sglang_ext.cpu.shared_cores import is_crowded

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_EXT_CPU_FUSED_LAYERS"
_MODELS = {"LlamaModel": "LlamaDecoderLayer", "Qwen2Model": "Qwen2DecoderLayer"}
_LINEAR = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_NO_FLOATS = np.empty(0, np.float32)
# In a crowd, what takes a thread alone less than waking another: products of so few rows with
# weights of so many numbers, some 40 us.
_FEW_ROWS, _SMALL_WEIGHT = 16, 1 << 20


class Attention(Protocol):
    """What is read of the attention backend (attention.py)."""

    kv_like: np.ndarray

    def layer_pool(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def kept_pools(self) -> object | None: ...

    def attention_arguments(self, layer: Any, batch: "ForwardBatch") -> tuple[Any, ...]: ...

    def tokens_of(self, layer: Any, batch: "ForwardBatch") -> int: ...


def fuse_layers(model: torch.nn.Module, backend: Attention) -> bool:
    """Have a model's decoder layers fused.

    Args:
        backend: the attention of the passes that are.

    Returns:
        whether all that it has is known here; otherwise it stays as it is.
    """
    decoder: Any = getattr(model, "model", None)
    if os.environ.get(VARIABLE) == "0" or type(decoder).__name__ not in _MODELS:
        return False
    fused = FusedDecoder.of(decoder, backend)
    if fused is None:
        return False
    fused.take_over()
    logger.info("%d decoder layers are fused", len(decoder.layers))
    return True


class FusedDecoder:
    """A decoder's layers, as `fused_kernel` takes them.

    Attributes:
        version: of the weights that it was made of.
    """

    def __init__(self, decoder: Any, backend: Attention, products: Sequence[list[Weight]]) -> None:
        self._decoder, self._backend = decoder, backend
        self._layers = list(decoder.layers)
        self.version = weights_version()
        first = self._layers[0]
        own = first.self_attn
        arrays = [_arrays(layer) for layer in self._layers]
        # Referred to by addresses: kept for as long as these.
        self._kept = (arrays, products)
        rows = [
            _row(layer, own_arrays, weights)
            for layer, own_arrays, weights in zip(self._layers, arrays, products, strict=True)
        ]
        self._addresses = np.array([row[0] for row in rows], np.int64)
        self._numbers = np.array([row[1] for row in rows], np.float32)
        bits = products[0][0].bits
        self._form = bits, multiplier_of(bits)
        self._room = LayerRoom(own.num_heads, own.head_dim, products[0])
        self._heads, self._kv_heads = own.num_heads, own.num_kv_heads
        self._size = own.head_dim
        self._has_small_projections = all(
            math.prod(columns_of(weight)[2:]) * LANES * GROUP <= _SMALL_WEIGHT
            for weight in products[0][:2]
        )
        self._cos_sin = own.rotary_emb.cos_sin_cache.numpy()
        self._halves = bool(own.rotary_emb.is_neox_style)
        self._norm = decoder.norm.weight.detach().numpy()
        self._epsilon = np.float32(decoder.norm.variance_epsilon)
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        self._pools, self._pool_slots = np.zeros((len(self._layers), 2), np.int64), 0
        self._pools_of: object | None = None

    @classmethod
    def of(cls, decoder: Any, backend: Attention) -> "FusedDecoder | None":
        """The decoder; None where it has something that is not known here."""
        layers = list(decoder.layers)
        if not layers or not all(_is_known(layer, type(decoder).__name__) for layer in layers):
            return None
        products = [found for layer in layers if (found := _products(layer)) is not None]
        if len(products) < len(layers) or len({w.bits for each in products for w in each}) > 1:
            return None
        if not _is_plain_norm(decoder.norm) or not _are_alike(layers):
            return None
        return cls(decoder, backend, products)

    def take_over(self) -> None:
        """Become the forward of the decoder, and of its layers one by one."""
        current: FusedDecoder | None = self
        decoder, backend, version = self._decoder, self._backend, self.version
        whole = decoder.forward
        parts = [layer.forward for layer in self._layers]

        def fused() -> FusedDecoder | None:
            nonlocal current, version
            if version != weights_version():
                current, version = FusedDecoder.of(decoder, backend), weights_version()
            return current

        def forward(
            input_ids: torch.Tensor,
            positions: torch.Tensor,
            forward_batch: "ForwardBatch",
            input_embeds: torch.Tensor | None = None,
            pp_proxy_tensors: Any = None,
        ) -> Any:
            now = fused()
            plain = input_embeds is None and pp_proxy_tensors is None
            if now is None or not plain or not now.takes(forward_batch, len(input_ids)):
                return whole(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
            return now.forward(input_ids, positions, forward_batch)

        def layer_forward(index: int) -> Callable[..., Any]:
            def forward(
                positions: torch.Tensor,
                hidden_states: torch.Tensor,
                forward_batch: "ForwardBatch",
                capture_output: Callable[..., None] | None = None,
            ) -> Any:
                now = fused()
                if (
                    now is None
                    or not now.takes(forward_batch, len(hidden_states))
                    or _has_residual(forward_batch)
                ):
                    return parts[index](positions, hidden_states, forward_batch, capture_output)
                if capture_output is not None:
                    capture_output(hidden_states)
                return now.run(index, index + 1, positions, hidden_states, forward_batch)

            return forward

        decoder.forward = forward
        for index, layer in enumerate(self._layers):
            layer.forward = layer_forward(index)

    def takes(self, batch: "ForwardBatch", tokens: int) -> bool:
        """Whether a pass of so many tokens is one of requests, with our attention."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = self._backend
        if get_attn_backend() is not backend or not tokens:
            return False
        return backend.tokens_of(self._layers[0].self_attn.attn, batch) == tokens

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: "ForwardBatch"
    ) -> Any:
        """What SGLang's decoder returns: float32[T, d] behind the final norm."""
        from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

        decoder = self._decoder
        if decoder.layers_to_capture:
            return self._one_by_one(input_ids, positions, batch)
        hidden = decoder.embed_tokens(input_ids)
        residual_batch.start(batch)
        start, count = 0, len(self._layers)
        while start < count:
            if _is_watched(self._layers[start]):
                hidden = self._layers[start](positions, hidden, batch)
                start += 1
                continue
            end = start + 1
            while end < count and not _is_watched(self._layers[end]):
                end += 1
            last = end == count and not _is_watched(decoder.norm)
            hidden = self.run(start, end, positions, hidden, batch, normed=last)
            start = end
            if last:
                residual_batch.clear(batch)
                return hidden
        return residual_batch.final_norm(hidden, batch, decoder.norm)

    def run(
        self,
        start: int,
        end: int,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        batch: "ForwardBatch",
        *,
        normed: bool = False,
    ) -> torch.Tensor:
        """Layers start:end: hidden float32[T, d] at positions [T] -> what it is behind them.

        Args:
            normed: behind the final norm too.
        """
        backend = self._backend
        attention = self._layers[start].self_attn.attn
        self._find_pools()
        x = hidden.contiguous().numpy()
        # Torch's arrays begin with a cache line.
        out, behind = torch.empty(2, *x.shape).numpy()
        if not normed:
            behind = out
        kernel.run_layers(
            x, out, self._room.of(len(x)), self._addresses[start:end],
            self._numbers[start:end], self._form, self._heads, self._kv_heads, self._size,
            self._pools[start:end], self._pool_slots, backend.kv_like, positions.numpy(),
            self._cos_sin, self._halves, batch.out_cache_loc.numpy(),
            self._norm if normed else _NO_FLOATS, self._epsilon, behind,
            *backend.attention_arguments(attention, batch), self._threads,
            self._small_threads(len(out)),
        )  # fmt: skip
        return torch.from_numpy(behind)

    def _small_threads(self, rows: int) -> int:
        """How many share the projections around the attention."""
        alone = is_crowded() and rows <= _FEW_ROWS and self._has_small_projections
        return 1 if alone else self._threads

    def _find_pools(self) -> None:
        """Where the layers' keys and values are, unless that is known."""
        kept = self._backend.kept_pools()
        if kept is not None and kept is self._pools_of:
            return
        for own, layer in zip(self._pools, self._layers, strict=True):
            keys, values = self._backend.layer_pool(layer.self_attn.attn.layer_id)
            own[:] = keys.data_ptr(), values.data_ptr()
            self._pool_slots = len(keys)
        self._pools_of = kept

    def _one_by_one(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: "ForwardBatch"
    ) -> Any:
        """SGLang's own loop, over layers that are fused."""
        return type(self._decoder).forward(self._decoder, input_ids, positions, batch)


def _has_residual(batch: "ForwardBatch") -> bool:
    stream = batch.residual_stream
    return stream is None or stream.residual is not None or stream.pending is not None


def _is_watched(module: torch.nn.Module) -> bool:
    """Whether somebody's hooks look at what goes into a module or comes out of it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _products(layer: Any) -> list[Weight] | None:
    """A layer's packed weights; None: one of them is multiplied by otherwise."""
    found: list[Weight] = []
    for name in _LINEAR:
        linear: Any = layer.get_submodule(name)
        method = getattr(linear, "quant_method", None)
        product = method.product_of(linear) if type(method) is PackedLinearMethod else None
        whole = linear.weight.shape[1] % GROUP == 0
        if not (isinstance(product, Weight) and whole):
            return None
        found.append(product)
    return found


def _is_known(layer: Any, model: str) -> bool:
    """Whether all that is beside the products is as `fused_kernel` has it."""
    if type(layer).__name__ != _MODELS[model]:
        return False
    from sglang.srt.layers.activation import SiluAndMul

    own, mlp = layer.self_attn, layer.mlp
    attention = own.attn
    return (
        type(mlp.act_fn) is SiluAndMul
        and _is_plain_norm(layer.input_layernorm)
        and _is_plain_norm(layer.post_attention_layernorm)
        and covers(own.rotary_emb)
        and own.rotary_emb.head_size == own.head_dim
        and attention.qk_head_dim == attention.v_head_dim == own.head_dim
        and attention.tp_q_head_num == own.num_heads
        # No other rank's part is to be added.
        and own.num_heads == own.total_num_heads
        and mlp.gate_up_proj.bias is None
        and mlp.down_proj.bias is None
    )


def _are_alike(layers: Sequence[Any]) -> bool:
    """Whether layers differ in their weights alone."""
    return (
        len(
            {
                (
                    layer.self_attn.num_heads,
                    layer.self_attn.num_kv_heads,
                    layer.self_attn.head_dim,
                    layer.self_attn.attn.scaling,
                    layer.self_attn.attn.logit_cap,
                    layer.self_attn.attn.sliding_window_size,
                    layer.self_attn.attn.attn_type,
                    id(layer.self_attn.rotary_emb),
                    layer.mlp.down_proj.weight.shape[1],
                )
                for layer in layers
            }
        )
        == 1
    )


def _is_plain_norm(norm: Any) -> bool:
    from sglang.srt.layers.layernorm import RMSNorm

    return (
        type(norm) is RMSNorm
        and norm.weight.dtype == torch.float32
        and norm.variance_size_override is None
    )


def _arrays(layer: Any) -> list[np.ndarray]:
    """A layer's norms and biases, float32; empty for none."""
    norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    biases = (layer.self_attn.qkv_proj.bias, layer.self_attn.o_proj.bias)
    return [
        _NO_FLOATS if each is None else each.detach().contiguous().numpy()
        for each in (*norms, *biases)
    ]


def _row(
    layer: Any, arrays: Sequence[np.ndarray], weights: Sequence[Weight]
) -> tuple[list[int], list[float]]:
    """A layer's row of `addresses` and of `numbers` in fused_kernel.run_layers."""
    first, second, qkv_bias, o_bias = arrays
    qkv, o, up, down = map(columns_of, weights)
    addresses = [
        first.ctypes.data, second.ctypes.data, *qkv, qkv_bias.ctypes.data, qkv_bias.size,
        *o, o_bias.ctypes.data, o_bias.size, *up, *down,
    ]  # fmt: skip
    factors = [w.factor if isinstance(w, GroupWeight) else 1.0 for w in weights]
    epsilons = (
        layer.input_layernorm.variance_epsilon,
        layer.post_attention_layernorm.variance_epsilon,
    )
    return addresses, [epsilons[0], factors[0], factors[1], epsilons[1], factors[2], factors[3]]
