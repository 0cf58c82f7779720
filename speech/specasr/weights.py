"""A Whisper's weights, as the draft model's fast products want them.

int8: weights quantized per output channel, activations at run time (torch's quantized kernels:
fbgemm, or oneDNN where the CPU has VNNI). A decoder step reads every weight once, so a quarter of
the bytes is most of a step's time; a drafter need not be exact. float32: packed once for oneDNN.
float16: as they are, for GPUs.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Linear = Callable[[torch.Tensor], torch.Tensor]
PRECISIONS = ("int8", "float32", "float16")


@dataclass(frozen=True)
class WhisperShape:
    """What a Whisper's config.json says of its sizes."""

    d_model: int
    vocab_size: int
    mel_bins: int
    source_positions: int
    target_positions: int
    encoder_layers: int
    encoder_heads: int
    decoder_layers: int
    decoder_heads: int

    @classmethod
    def read(cls, folder: Path) -> "WhisperShape":
        """Read FOLDER/config.json.

        Raises:
            ValueError: there is none, or it is not a Whisper's.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} is no Hugging Face Whisper folder: no config.json in it")
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if config.get("model_type") != "whisper":
            raise ValueError(f"{path}: model_type is {config.get('model_type')!r}, not 'whisper'")
        return cls(
            d_model=config["d_model"],
            vocab_size=config["vocab_size"],
            mel_bins=config["num_mel_bins"],
            source_positions=config["max_source_positions"],
            target_positions=config["max_target_positions"],
            encoder_layers=config["encoder_layers"],
            encoder_heads=config["encoder_attention_heads"],
            decoder_layers=config["decoder_layers"],
            decoder_heads=config["decoder_attention_heads"],
        )


class Weights:
    """The tensors of a folder's safetensors files, by transformers' names.

    Args:
        folder: with *.safetensors.
        precision: of the linear layers, one of PRECISIONS; float16 is that of all tensors.
        device: where they go; int8 needs "cpu".

    Raises:
        ValueError: the folder has no such file, or `take` asks for a tensor that is not there.
    """

    def __init__(self, folder: Path, precision: str = "int8", device: str = "cpu") -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
        if precision == "int8" and device != "cpu":
            raise ValueError(f"precision int8 has products for device cpu only, not for {device}")
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} has no *.safetensors file with the draft model's weights")
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            self._tensors |= load_file(file)
        self.precision = precision
        self._device = device
        self.dtype = torch.float16 if precision == "float16" else torch.float32

    def take(self, name: str) -> torch.Tensor:
        """The tensor `name` on the device, of `dtype`."""
        return self._placed(self._stored(name))

    def _stored(self, name: str) -> torch.Tensor:
        for known in (name, f"model.{name}"):
            if known in self._tensors:
                return self._tensors[known].float()
        raise ValueError(f"{self._folder} has no weights named {name!r}")

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, self.dtype).contiguous()

    def norm(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of a LayerNorm."""
        return self.take(f"{name}.weight"), self.take(f"{name}.bias")

    def linear(self, *names: str, scale_first: float = 1.0) -> Linear:
        """The product with the named layers' weights, stacked; the first one's output scaled."""
        return self._linear(*self.stacked(*names, scale_first=scale_first))

    def stacked(self, *names: str, scale_first: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [N, K] and biases [N] of the named layers, as `linear` has them, in float32."""
        weights = [self._stored(f"{name}.weight") for name in names]
        biases = [
            torch.zeros(len(weight)) if name.endswith("k_proj") else self._stored(f"{name}.bias")
            for name, weight in zip(names, weights, strict=True)
        ]
        weights[0], biases[0] = weights[0] * scale_first, biases[0] * scale_first
        return torch.cat(weights), torch.cat(biases)

    def head(self) -> Linear:
        """The product that gives logits: the token embeddings, no bias."""
        embeddings = self._stored("decoder.embed_tokens.weight")
        return self._linear(embeddings, torch.zeros(len(embeddings)))

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor) -> Linear:
        return packed_linear(self._placed(weight), self._placed(bias), self.precision)


def packed_linear(weight: torch.Tensor, bias: torch.Tensor, precision: str) -> Linear:
    """x [n, K] -> x @ weight.T + bias, [n, N], with `weight` [N, K] packed once.

    Args:
        weight, bias: float32, or float16 where that is the precision; so are x and the product.
    """
    if precision == "int8":
        return _int8_linear(weight, bias)
    unpacked = precision == "float16" or weight.device.type != "cpu"
    if unpacked or not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _int8_linear(weight: torch.Tensor, bias: torch.Tensor) -> Linear:
    scales = (weight.abs().amax(dim=1) / 127).clamp_min(1e-8)
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():
        # Deprecated with nothing in its place: torch's newer int8 products are not for the CPU.
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantized, bias)
    product = torch.ops.quantized.linear_dynamic
    # reduce_range: activations of 7 bits, for AVX2's 8-bit products saturate with 8.
    return lambda x: product(x, packed, True)
