"""Linear layers on CPUs with weights packed once for oneDNN.

Plain torch hands fp32 products to MKL, which packs the weight matrix again at every call. Packed
once, a product of few rows takes as long as reading the weights from memory, and rows come out
bitwise the same whatever the number of rows beside them (see product_rows.py), so that a token's
logits do not depend on its batch. SGLang 0.5.23's unquantized linear layers and LM heads are
switched over after loading; the original weights stay for whoever else reads them (embedding
look-ups, LoRA, weight updates): packed weights take their size in memory once more.

SGLANG_EXT_CPU_PREPACK=0 turns this off. With `--cpu-weights int8` or `int4` the packed weights have
8 or 4 bits (group_weights.py), an LM head 8 in both: the tokens that it ranks lie close together.
"""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

from sglang_ext import sglang_points
from sglang_ext.cpu.group_weights import BITS, grouped
from sglang_ext.cpu.product_rows import pack, product, rounded_up, rows_to_run
from sglang_ext.options import Options
from sglang_ext.sglang_points.hooking import hook

PREPACK_VARIABLE = "SGLANG_EXT_CPU_PREPACK"

_HEAD_BITS = 8

# Raised by every weight update that does not run process_weights_after_loading.
_weights_version = 0


class PackedWeight:
    """A weight matrix [N, K] in oneDNN's layout, with the product x @ weight.T + bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.source = weight
        self.version = _weights_version
        self._packed = pack(weight.detach())
        rows, columns = weight.shape
        self._rows_to_run = rows_to_run(rows, columns, weight.dtype, torch.get_num_threads())

    @property
    def nbytes(self) -> int:
        """What a product reads of it."""
        return self.source.nbytes

    def is_current(self, weight: torch.Tensor) -> bool:
        return self.source is weight and self.version == _weights_version

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of the weight's dtype."""
        x2d = x.reshape(-1, x.shape[-1])
        rows = x2d.shape[0]
        listed = self._rows_to_run
        more = (listed[rows] if rows < len(listed) else rounded_up(rows)) - rows
        if more:
            out = product(F.pad(x2d, (0, 0, 0, more)), self._packed, bias)[:rows]
        else:
            out = product(x2d, self._packed, bias)
        return out.view(*x.shape[:-1], out.shape[-1])


class GroupedWeight(PackedWeight):
    """A weight matrix [N, K] in 8 or 4 bits, with the same product.

    A matrix that these do not fit (groups of 32 inputs, finite weights) is packed as it is.
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        self.source = weight
        self.version = _weights_version
        self._weight = grouped(weight, bits) or _as_it_is(weight)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._weight.linear(x, bias)


class _PlainWeight:
    """A matrix that oneDNN has no packed product for."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self._weight, bias)


def _as_it_is(weight: torch.Tensor) -> PackedWeight | _PlainWeight:
    return PackedWeight(weight) if can_pack(weight) else _PlainWeight(weight)


def made(weight: torch.Tensor, *, head: bool) -> PackedWeight | None:
    """The weight packed as `--cpu-weights` asks for; None where it is of a type that cannot be."""
    bits = BITS.get(Options.from_env().cpu_weights)
    if bits is not None and _is_float_matrix(weight):
        return GroupedWeight(weight, _HEAD_BITS if head else bits)
    return PackedWeight(weight) if can_pack(weight) else None


def packed_product(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [T, K] -> x @ weight.T + bias, [T, N], packed once where this CPU has that."""
    packed = PackedWeight(weight) if can_pack(weight) else None
    if packed is None:
        return lambda x: F.linear(x, weight, bias)
    return lambda x: packed.linear(x, bias)


class PackedLinearMethod(UnquantizedLinearMethod):
    """SGLang's unquantized linear method, over a packed weight."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._weight = made(layer.weight, head=False)

    def read_bytes(self, layer: torch.nn.Module) -> int:
        """What a product reads, for the cost of a step (budget/cost_sweep.py)."""
        return _read_bytes(self._weight, layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        same = x.dtype == layer.weight.dtype
        packed = repacked(self._weight, layer.weight, head=False) if same else None
        if packed is None:
            return F.linear(x, layer.weight, bias)
        self._weight = packed
        return packed.linear(x, bias)


def _read_bytes(packed: PackedWeight | None, layer: torch.nn.Module) -> int:
    """What a product with a layer's parameters reads: of a packed weight, what that takes."""
    sizes = {name: p.nbytes for name, p in layer.named_parameters(recurse=False)}
    if packed is not None:
        sizes["weight"] = packed.nbytes
    return sum(sizes.values())


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """SGLang's unquantized embedding method, whose products (LM head) use a packed weight.

    SGLang's LogitsProcessor calls `apply` of any method that is not one of its own unquantized
    ones. The weight is packed at the first product: an embedding table that is no LM head never is.
    """

    def __init__(self) -> None:
        self._weight: PackedWeight | None = None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._weight = None

    def read_bytes(self, layer: torch.nn.Module) -> int:
        """What a product reads, for the cost of a step (budget/cost_sweep.py)."""
        return _read_bytes(self._weight, layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = layer.weight
        packed = repacked(self._weight, weight, head=True)
        if packed is None:
            return F.linear(x.to(weight.dtype), weight, bias)
        self._weight = packed
        return packed.linear(x.to(weight.dtype), bias)


def repacked(
    packed: PackedWeight | None, weight: torch.Tensor, *, head: bool
) -> PackedWeight | None:
    """The weight as it is now, packed; None where an update made it a type that cannot be."""
    if packed is not None and packed.is_current(weight):
        return packed
    return made(weight, head=head)


def _is_float_matrix(weight: torch.Tensor) -> bool:
    types = (torch.float32, torch.bfloat16, torch.float16)
    return weight.device.type == "cpu" and weight.dim() == 2 and weight.dtype in types


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a packed product for this weight on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.device.type != "cpu" or weight.dim() != 2 or not weight.is_contiguous():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def register() -> None:
    """Have SGLang pack its weights after loading; once in every process, before models load."""
    if Options.from_env().cpu_weights not in BITS and not _prepacks():
        return
    hook(sglang_points.LINEAR, _pack_linear)
    hook(sglang_points.HEAD, _pack_head)
    for point in sglang_points.WEIGHT_UPDATES:
        hook(point, _note_update)


def _prepacks() -> bool:
    return os.environ.get(PREPACK_VARIABLE, "1") != "0" and torch.backends.mkldnn.is_available()


def _covered(weight: torch.Tensor) -> bool:
    if Options.from_env().cpu_weights in BITS:
        return _is_float_matrix(weight)
    return can_pack(weight)


def _pack_linear(_result: None, method: UnquantizedLinearMethod, layer: torch.nn.Module) -> None:
    if type(method) is UnquantizedLinearMethod and _covered(layer.weight):
        layer.quant_method = PackedLinearMethod(layer)


def _pack_head(_result: None, method: UnquantizedEmbeddingMethod, layer: torch.nn.Module) -> None:
    if type(method) is UnquantizedEmbeddingMethod and _covered(layer.weight):
        layer.quant_method = PackedHeadMethod()


def _note_update(_result: object, *args: object, **kwargs: object) -> None:
    global _weights_version
    _weights_version += 1
