"""SGLang's linear layers and LM heads on CPUs, with weights packed once (packed_weights.py).

SGLang 0.5.23's unquantized linear layers and LM heads are switched over after loading, so that a
token's logits do not depend on its batch. With `--cpu-weights fp32` the original weights stay for
whoever else reads them (LoRA, weight updates): packed weights take their size in memory once more.
SGLANG_EXT_CPU_PREPACK=0 turns this off.

With `--cpu-weights bf16`, `int8` or `int4` the packed weights have 16, 8 or 4 bits, an LM head at
least 8, and so have layers that run at prefill only (Whisper's encoder). The original ones are then
let go of (released_weights.py), but for tables that embeddings are looked up in.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from sglang_ext import sglang_points
from sglang_ext.cpu.packed_weights import (
    BITS,
    PlainWeight,
    Product,
    as_it_is,
    bits_of,
    can_pack,
    for_encoder,
    for_prefill,
    has_fast_encoder,
    in_bits,
    is_float_matrix,
)
from sglang_ext.cpu.released_weights import (
    check_weights_refused,
    is_released,
    keeps_weights,
    release,
)
from sglang_ext.options import Options
from sglang_ext.sglang_points.hooking import hook
from sglang_ext.whisper.encoder_decoder import is_in_encoder, is_prefill_only

PREPACK_VARIABLE = "SGLANG_EXT_CPU_PREPACK"

# Raised by every weight update that does not run process_weights_after_loading.
_weights_version = 0


@dataclass
class _Packed:
    """A layer's packed weight, and the parameter and version of it that it was packed from."""

    product: Product
    source: torch.Tensor
    version: int

    def is_current(self, weight: torch.Tensor) -> bool:
        """Whether it is the weight's; one that is not kept cannot have changed."""
        if self.source is not weight:
            return False
        return self.version == _weights_version or is_released(weight)


class _PackedMethod:
    """What linear layers and LM heads have in common: a product that follows the layer's weight.

    Attributes:
        head: whether the layer is an LM head.
    """

    head: bool
    _packed: _Packed | None = None

    def read_bytes(self, layer: torch.nn.Module) -> int:
        """What a product reads, for the cost of a step (budget/cost_sweep.py)."""
        sizes = {name: p.nbytes for name, p in layer.named_parameters(recurse=False)}
        if self._packed is not None:
            sizes["weight"] = self._packed.product.nbytes
        return sum(sizes.values())

    def product_of(self, layer: Any) -> Product | None:
        """The layer's weight as it is now, packed; None where it cannot be."""
        weight = layer.weight
        if self._packed is None or not self._packed.is_current(weight):
            self._packed = _made(layer, self.head)
        return None if self._packed is None else self._packed.product


def _made(layer: Any, head: bool) -> _Packed | None:
    """The layer's weight packed as `--cpu-weights` asks for; None: it is of no type that can be."""
    form = Options.from_env().cpu_weights
    bits = bits_of(form, head=head)
    if bits is not None and is_float_matrix(layer.weight):
        pack = in_bits
        if has_fast_encoder(form) and is_prefill_only(layer):
            pack = for_encoder if is_in_encoder(layer) else for_prefill
        made = pack(layer.weight, bits)
        if not isinstance(made, PlainWeight) and _has_it_alone(layer, head) and not keeps_weights():
            release(layer)
        return _Packed(made, layer.weight, _weights_version)
    made = as_it_is(layer.weight)
    return None if isinstance(made, PlainWeight) else _Packed(made, layer.weight, _weights_version)


def _has_it_alone(layer: Any, head: bool) -> bool:
    """Whether products are all that a layer's weight is for: tied heads look embeddings up in it.

    ParallelLMHead's own forward refuses that, and a table tied to one is a parameter of its own.
    """
    return not head or isinstance(layer, ParallelLMHead)


class PackedLinearMethod(_PackedMethod, UnquantizedLinearMethod):
    """SGLang's unquantized linear method, over a packed weight."""

    head = False

    def __init__(self, layer: torch.nn.Module) -> None:
        self.process_weights_after_loading(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not is_released(layer.weight):
            self._packed = None
            self.product_of(layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        product = self.product_of(layer) if x.dtype == layer.weight.dtype else None
        return F.linear(x, layer.weight, bias) if product is None else product.linear(x, bias)


class PackedHeadMethod(_PackedMethod, UnquantizedEmbeddingMethod):
    """SGLang's unquantized embedding method, whose products (LM head) use a packed weight.

    SGLang's LogitsProcessor calls `apply` of any method that is not one of its own unquantized
    ones. The weight is packed at the first product: an embedding table that is no LM head never is.
    """

    head = True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not is_released(layer.weight):
            self._packed = None

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        product = self.product_of(layer)
        x = x.to(layer.weight.dtype)
        return F.linear(x, layer.weight, bias) if product is None else product.linear(x, bias)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Rows of the table, float[T, d], by NumPy: torch takes ten times as long."""
        weight = layer.weight.detach()
        if weight.dtype != torch.float32 or input_.dim() != 1:
            return super().embedding(layer, input_)
        return torch.from_numpy(weight.numpy()[input_.numpy()])


def register() -> None:
    """Have SGLang pack its weights after loading; once in every process, before models load."""
    in_fewer_bits = Options.from_env().cpu_weights in BITS
    if not in_fewer_bits and not _prepacks():
        return
    if in_fewer_bits:
        hook(sglang_points.CHECK_WEIGHTS, check_weights_refused)
    hook(sglang_points.LINEAR, _pack_linear)
    hook(sglang_points.HEAD, _pack_head)
    for point in sglang_points.WEIGHT_UPDATES:
        hook(point, _note_update)


def _prepacks() -> bool:
    return os.environ.get(PREPACK_VARIABLE, "1") != "0" and torch.backends.mkldnn.is_available()


def _covered(weight: torch.Tensor) -> bool:
    if Options.from_env().cpu_weights in BITS:
        return is_float_matrix(weight)
    return can_pack(weight)


def _pack_linear(_result: None, method: UnquantizedLinearMethod, layer: torch.nn.Module) -> None:
    if type(method) is UnquantizedLinearMethod and _covered(layer.weight):
        layer.quant_method = PackedLinearMethod(layer)


def _pack_head(_result: None, method: UnquantizedEmbeddingMethod, layer: torch.nn.Module) -> None:
    if type(method) is UnquantizedEmbeddingMethod and _covered(layer.weight):
        layer.quant_method = PackedHeadMethod()


def weights_version() -> int:
    """Another number after every weight update."""
    return _weights_version


def _note_update(_result: object, *args: object, **kwargs: object) -> None:
    global _weights_version
    _weights_version += 1
