"""A Llama checkpoint made on the spot: random weights with a planted rule (planted.py)."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from scripts.gpu_kit.planted import LEVELS, Rule

ROPE_THETA = 500_000.0
# Of the planted dimensions, where the others have 1.
AMPLITUDE = 6.0
# Of random weights that read the residual stream, times sqrt(2048 / hidden size).
WEIGHT_STD = 0.02
# What all layers together add to the residual stream, against its 1.
LAYERS_STD = 0.5
# The head's peak and the other tokens' standard deviation, in logits.
PEAK, NOISE = 20.0, 0.25
# The attention logit of the right lag. RoPE's ten fastest rotations, the faster the more weight,
# keep every other distance up to 40,000 at least 0.14 of it below.
LAG_LOGIT, LAG_PAIRS, LAG_DECAY = 400.0, 10, 0.8
BOS, EOS, FIRST_WORD = 256, 257, 258


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    symbols: int
    context: int

    def rule(self, seed: int) -> Rule:
        """The rule that the checkpoint of this seed holds; symbols are spoken as a, b, c, ..."""
        return Rule(self.vocab, self.symbols, ord("a"), seed=seed)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 256, 3, 4, 2, 64, 512, 512, 16, 4096),
        Shape("1b", 2048, 16, 32, 8, 64, 8192, 128_256, 26, 131_072),
        Shape("8b", 4096, 32, 32, 8, 128, 14_336, 128_256, 26, 131_072),
    )
}


def write(folder: Path, shape: Shape, seed: int, device: str = "cpu") -> None:
    """Write config, tokenizer and bf16 weights, a file a layer; nothing if they are there.

    Random numbers are drawn on `device`: a GPU's differ from a CPU's, the rule does not.
    """
    done = folder / "written"
    if done.exists() and done.read_text() == f"{shape} {seed}":
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1))
    _write_tokenizer(folder, shape)
    index: dict[str, str] = {}
    for number, tensors in enumerate(_files(shape, seed, device)):
        name = f"model-{number:05}.safetensors"
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, folder / name)
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    done.write_text(f"{shape} {seed}")


def config(shape: Shape) -> dict[str, Any]:
    """Hugging Face's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    """256 bytes, begin and end, and a word `<n>` for each id above; nothing is merged."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_of = _byte_characters()
    vocab = {byte_of[byte]: byte for byte in range(256)}
    vocab |= {"<begin>": BOS, "<end>": EOS}
    vocab |= {f"<{n}>": n for n in range(FIRST_WORD, shape.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<begin>"), AddedToken("<end>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<begin>",
                "eos_token": "<end>",
                "model_max_length": shape.context,
            }
        )
    )


def _byte_characters() -> list[str]:
    """GPT-2's printable character for each byte, as tokenizers' ByteLevel writes them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@dataclass(frozen=True)
class _Places:
    """Which dimensions of the residual stream hold what."""

    symbols: int
    steps: int

    constant = 0

    def state(self, step: int) -> slice:
        """One-hot of the state after `step` tables; 0: the token's own symbol."""
        start = 1 + step * self.symbols
        return slice(start, start + self.symbols)

    def lagged(self, step: int) -> slice:
        """One-hot of the symbol that table `step` (from 1) looks back for."""
        start = 1 + (self.steps + step) * self.symbols
        return slice(start, start + self.symbols)

    @property
    def size(self) -> int:
        return 1 + (2 * self.steps + 1) * self.symbols


def mixing_layers(shape: Shape, steps: int) -> dict[int, int]:
    """step (from 1) by the layer that looks back and applies its table; the last layer is one."""
    return {round(n * shape.layers / steps) - 1: n for n in range(1, steps + 1)}


def _files(shape: Shape, seed: int, device: str) -> Iterator[dict[str, torch.Tensor]]:
    rule = shape.rule(seed)
    places = _Places(shape.symbols, len(rule.lags))
    if places.size > shape.hidden or shape.symbols**2 > shape.intermediate:
        raise ValueError(f"shape {shape.name} has no room for {shape.symbols} symbols")
    draw = _Draw(seed, device)
    yield {"model.embed_tokens.weight": _embedding(shape, rule, places, draw)}
    steps = mixing_layers(shape, len(rule.lags))
    for layer in range(shape.layers):
        weights = _random_layer(shape, places, draw)
        if layer in steps:
            _plant(weights, shape, rule, places, steps[layer])
        yield {
            f"model.layers.{layer}.{name}.weight": value.to(torch.bfloat16)
            for name, value in weights.items()
        }
    yield {
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        "lm_head.weight": _head(shape, rule, places, draw),
    }


class _Draw:
    """Normal float32 tensors, the same in every run on the same kind of device."""

    def __init__(self, seed: int, device: str):
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def __call__(self, rows: int, columns: int, std: float) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=self._generator, device=self._device)
        return values.mul_(std)


def _embedding(shape: Shape, rule: Rule, places: _Places, draw: _Draw) -> torch.Tensor:
    weight = draw(shape.vocab, shape.hidden, 1.0)
    weight[:, : places.size] = 0
    # Of the same length for every token: what the norm makes of the planted dimensions is too.
    weight *= math.sqrt(shape.hidden - places.size) / weight.norm(dim=1, keepdim=True)
    weight[:, places.constant] = AMPLITUDE
    tokens = torch.arange(shape.vocab, device=weight.device)
    symbol = torch.from_numpy(rule.symbol_of).to(weight.device)
    weight[tokens, places.state(0).start + symbol] = AMPLITUDE
    return weight.to(torch.bfloat16)


def _random_layer(shape: Shape, places: _Places, draw: _Draw) -> dict[str, torch.Tensor]:
    read = WEIGHT_STD * math.sqrt(2048 / shape.hidden)
    # Outputs of attention are below 1, of the gated product about 0.35 of read^2 * hidden.
    write = LAYERS_STD / math.sqrt(2 * shape.layers)
    inner = 0.35 * read**2 * shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "self_attn.q_proj": draw(q, shape.hidden, read),
        "self_attn.k_proj": draw(kv, shape.hidden, read),
        "self_attn.v_proj": draw(kv, shape.hidden, read),
        "self_attn.o_proj": draw(shape.hidden, q, write / math.sqrt(q)),
        "mlp.gate_proj": draw(shape.intermediate, shape.hidden, read),
        "mlp.up_proj": draw(shape.intermediate, shape.hidden, read),
        "mlp.down_proj": draw(
            shape.hidden, shape.intermediate, write / inner / math.sqrt(shape.intermediate)
        ),
    }
    # Nothing random is written over what is planted.
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[name][: places.size] = 0
    norm = torch.ones(shape.hidden)
    return weights | {"input_layernorm": norm, "post_attention_layernorm": norm.clone()}


def rms(shape: Shape, places_size: int, active: float) -> float:
    """About the residual stream's root mean square with `active` planted dimensions on."""
    others = (shape.hidden - places_size) * (1 + LAYERS_STD**2 / 2)
    return math.sqrt((others + active * AMPLITUDE**2) / shape.hidden)


def _plant(
    weights: dict[str, torch.Tensor], shape: Shape, rule: Rule, places: _Places, step: int
) -> None:
    """Make a layer look `lags[step - 1]` back and apply table `step`."""
    k = shape.symbols
    before = rms(shape, places.size, 2 * step)  # the constant, and a state and a lag per step
    between = rms(shape, places.size, 2 * step + 1)
    group = shape.heads // shape.kv_heads * shape.head_dim
    query, key = lag_vectors(shape.head_dim, rule.lags[step - 1])
    unit = before / AMPLITUDE  # of the constant, after the norm
    for name, vector, rows in (
        ("self_attn.q_proj", query, group),
        ("self_attn.k_proj", key, shape.head_dim),
    ):
        weights[name][:rows] = 0
        weights[name][: shape.head_dim, places.constant] = torch.from_numpy(vector * unit)
    weights["self_attn.v_proj"][: shape.head_dim] = 0
    weights["self_attn.v_proj"][:k, places.state(0)] = torch.eye(k)
    weights["self_attn.o_proj"][:, : shape.head_dim] = 0
    weights["self_attn.o_proj"][places.lagged(step), :k] = torch.eye(k) * before

    # One gated unit for each pair of state and lagged symbol: on where both are.
    gate, up, down = (weights[f"mlp.{n}_proj"] for n in ("gate", "up", "down"))
    gate[: k * k], up[: k * k], down[:, : k * k] = 0, 0, 0
    unit = between / AMPLITUDE
    steep = 40.0
    state, lagged = np.divmod(np.arange(k * k), k)
    units = np.arange(k * k)
    gate[units, places.state(step - 1).start + state] = steep * unit
    gate[units, places.lagged(step).start + lagged] = steep * unit
    gate[units, places.constant] = -1.5 * steep * unit
    up[units, places.constant] = unit
    last = step == len(rule.lags)
    targets = rule.last_table if last else rule.tables[step - 1][:, :, None]
    for rank, level in enumerate(LEVELS[: targets.shape[-1]]):
        to = places.state(step).start + targets[state, lagged, rank]
        down[to, units] = level * AMPLITUDE / (0.5 * steep)


def lag_vectors(head_dim: int, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """float64[head_dim] query and key, whose product after RoPE is largest `lag` back.

    The product at distance d is LAG_LOGIT * sqrt(head_dim) times the weighted mean of
    cos(theta_n (d - lag)) over the LAG_PAIRS fastest of RoPE's rotations.
    """
    half = head_dim // 2
    theta = rope_angles(head_dim)[:LAG_PAIRS]
    share = LAG_DECAY ** np.arange(LAG_PAIRS)
    size = np.sqrt(LAG_LOGIT * math.sqrt(head_dim) * share / share.sum())
    query, key = np.zeros(head_dim), np.zeros(head_dim)
    query[:LAG_PAIRS] = size
    key[:LAG_PAIRS] = size * np.cos(theta * lag)
    key[half : half + LAG_PAIRS] = size * np.sin(theta * lag)
    return query, key


def rope_angles(head_dim: int) -> np.ndarray:
    """float64[head_dim / 2], RoPE's rotation per position of each pair of dimensions."""
    return ROPE_THETA ** (-np.arange(0, head_dim, 2) / head_dim)


def _head(shape: Shape, rule: Rule, places: _Places, draw: _Draw) -> torch.Tensor:
    weight = draw(shape.vocab, shape.hidden, NOISE / math.sqrt(shape.hidden))
    steps = len(rule.lags)
    # The last state has four symbols on, together sum(level^2) as strong as one.
    active = 2 * steps + 1 + sum(level**2 for level in LEVELS)
    amplitude = AMPLITUDE / rms(shape, places.size, active)
    weight[:, : places.size] = 0
    spoken = torch.from_numpy(rule.spoken).to(weight.device)
    symbols = torch.arange(shape.symbols, device=weight.device)
    weight[spoken, places.state(steps).start + symbols] = PEAK / amplitude
    return weight.to(torch.bfloat16)
