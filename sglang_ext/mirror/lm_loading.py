"""Loading a draft model: a folder of safetensors, as transformers loads it, matrix by matrix."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sglang_ext.mirror.causal_lm import CausalLM, Layer, LMShape
from sglang_ext.mirror.weight_formats import Weight, made

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
# Of transformers' rotary embeddings, those that do not change with the text's length.
_ROPES = ("linear", "llama3", "yarn")


class DraftModelError(ValueError):
    """A folder holds no model that can draft; the message says why."""


def config_of(folder: str | Path) -> dict[str, Any]:
    """A model's config.json, where its architecture is one of ARCHITECTURES.

    Raises:
        DraftModelError: it is not.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftModelError(f"{path} cannot be read: {error}") from None
    names = config.get("architectures") or ["none"]
    if names[0] not in ARCHITECTURES:
        raise DraftModelError(
            f"{folder} is a {names[0]}; expected one of {', '.join(ARCHITECTURES)}"
        )
    if config.get("quantization_config"):
        raise DraftModelError(f"{folder} is quantized; expected plain safetensors")
    if config.get("sliding_window") and config.get("use_sliding_window", names[0][:3] == "Mis"):
        raise DraftModelError(f"{folder} has a sliding window, which this drafter lacks")
    return config


def load(folder: str | Path, kind: str, device: str = "cpu") -> CausalLM:
    """A model, its matrices in one of weight_formats.FORMATS.

    Raises:
        DraftModelError: it cannot be used; the message says why.
    """
    config_of(folder)
    try:
        tensors = _Tensors(Path(folder))
        return _model(tensors, Path(folder), kind, device)
    except (OSError, KeyError, RuntimeError) as error:
        raise DraftModelError(f"{folder} does not load: {error}") from error


class _Tensors:
    """A model's tensors by name, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        if not self._file_of:
            raise DraftModelError(f"{folder} has no *.safetensors")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file_of[name].get_tensor(name).float()

    def joined(self, prefix: str, names: tuple[str, ...], last: str) -> torch.Tensor:
        """Tensors one above the other."""
        return torch.cat([self[f"{prefix}{name}.{last}"] for name in names])


def _model(tensors: _Tensors, folder: Path, kind: str, device: str) -> CausalLM:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    heads = config.num_attention_heads
    shape = LMShape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
    )
    on_cpu = device.startswith("cpu")
    layers = [_layer(tensors, f"model.layers.{i}.", kind, device) for i in range(shape.layers)]
    embedding = tensors["model.embed_tokens.weight"]
    tied = config.tie_word_embeddings or "lm_head.weight" not in tensors
    head = made(embedding if tied else tensors["lm_head.weight"], kind, device)
    inv_freq, rope_scale = _rotary(config, shape.head_dim)
    wide = kind == "fp32"
    return CausalLM(
        shape,
        embedding.to(device, torch.float32 if wide else torch.bfloat16),
        layers,
        tensors["model.norm.weight"].to(device),
        head,
        inv_freq.to(device),
        rope_scale,
        # A CPU without bfloat16 units computes float32 faster; a GPU the other way round.
        torch.float32 if wide or on_cpu else torch.bfloat16,
    )


def _rotary(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    """The rotary embedding's frequencies, float32[head_dim / 2], and its scale."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in _ROPES:
        raise DraftModelError(f"the model has {kind} rotary embeddings, which this drafter lacks")
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return inv_freq.float(), float(scale)


def _layer(tensors: _Tensors, prefix: str, kind: str, device: str) -> Layer:
    def vector(name: str) -> torch.Tensor | None:
        return tensors[prefix + name].to(device) if prefix + name in tensors else None

    def matrix(*names: str) -> Weight:
        return made(tensors.joined(prefix, names, "weight"), kind, device)

    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias", "mlp.gate_proj.bias"):
        if prefix + name in tensors:
            raise DraftModelError(f"the model has {prefix}{name}, which this drafter lacks")
    attention = tuple(f"self_attn.{name}_proj" for name in "qkv")
    biased = f"{prefix}{attention[0]}.bias" in tensors
    return Layer(
        attention_norm=tensors[prefix + "input_layernorm.weight"].to(device),
        qkv=matrix(*attention),
        qkv_bias=tensors.joined(prefix, attention, "bias").to(device) if biased else None,
        q_norm=vector("self_attn.q_norm.weight"),
        k_norm=vector("self_attn.k_norm.weight"),
        out=matrix("self_attn.o_proj"),
        mlp_norm=tensors[prefix + "post_attention_layernorm.weight"].to(device),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
        down=matrix("mlp.down_proj"),
    )
