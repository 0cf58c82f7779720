"""A wider and deeper Whisper that computes what a small one does, to time a large one's decoder.

Widening writes every channel `width` times side by side. A LayerNorm sees the same mean and
variance, so it needs no more than its weights repeated; a matrix sees every input `width` times,
so its weights are divided by `width`; attention gets `width` equal copies of each head, and the
final LayerNorm is divided by `width` because the tied output projection sums over all copies.
(Function-preserving widening: Chen, Goodfellow, Shlens, "Net2Net", ICLR 2016, section 3.)
Deepening puts copies of a layer behind it whose output projections are zero: they cost what a
layer costs and add nothing. Logits are equal up to the rounding of longer sums.
"""

import json
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

CONFIG_KEY = "enlarged_from"  # in the written config.json: the source's name and the Enlargement
_SHARD_BYTES = 500_000_000
_LAYER = re.compile(r"model\.(encoder|decoder)\.layers\.(\d+)\.(.+)")
# What a layer adds to the residual stream ends in these.
_OUTPUTS = ("self_attn.out_proj", "encoder_attn.out_proj", "fc2")


@dataclass(frozen=True)
class Enlargement:
    """How much larger the model becomes.

    Attributes:
        width: how often each channel, head and feed-forward unit is repeated, at least 1.
        encoder_layers: layers of the written model; None: as many as the source has.
        decoder_layers: the same for the decoder.
    """

    width: int = 2
    encoder_layers: int | None = None
    decoder_layers: int | None = None


def enlarge(
    source: Path,
    target: Path,
    how: Enlargement | None = None,
    *,
    name: str = "",
    progress: bool = False,
) -> None:
    """Write an enlarged copy of the Hugging Face Whisper in `source` to the new folder `target`.

    Weights are written in fp32. Only a rename makes `target` appear, when all of it is on disk.

    Args:
        name: what the source is called in the written config.json (default: its folder's name).
        progress: show a progress bar on standard error.
    Raises:
        FileExistsError: `target` is there already.
        ValueError: `source` holds no Whisper, or `how` does not enlarge it.
        OSError: the disk is full, or `target` cannot be written.
    """
    how = how or Enlargement()
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; choose another folder or remove it first")
    config = _read_config(source)
    plan = _LayerPlan.of(config, how)
    new_config = enlarged_config(config, how, name or source.resolve().name)
    partial = target.absolute().parent / f".{target.name}.{os.getpid()}.partial"
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        _write_weights(source, partial, plan, how.width, progress)
        _copy_other_files(source, partial, plan)
        _write_json(partial / "config.json", new_config)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors makes its files readable by their owner only
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def enlarged_config(config: dict[str, Any], how: Enlargement, name: str) -> dict[str, Any]:
    """config.json of the enlarged model; `CONFIG_KEY` says what it was made from."""
    plan = _LayerPlan.of(config, how)
    width = how.width
    widened = [f"{side}_{what}" for side in plan.sources for what in ("attention_heads", "ffn_dim")]
    layers = {side: len(sources) for side, sources in plan.sources.items()}
    made = asdict(how) | {f"{side}_layers": count for side, count in layers.items()}
    return {
        **config,
        **{key: config[key] * width for key in ("d_model", *widened)},
        **{f"{side}_layers": count for side, count in layers.items()},
        "num_hidden_layers": layers["encoder"],
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
        CONFIG_KEY: {"name": name, **made},
    }


@dataclass(frozen=True)
class _LayerPlan:
    """For each side, the source layer that each written layer is a copy of, in order.

    The first copy of a layer does its work, the others behind it add zero.
    """

    sources: dict[str, list[int]]

    @classmethod
    def of(cls, config: dict[str, Any], how: Enlargement) -> "_LayerPlan":
        if how.width < 1:
            raise ValueError(f"width is {how.width}, expected 1 or more")
        sources = {}
        for side, wanted in (("encoder", how.encoder_layers), ("decoder", how.decoder_layers)):
            have = int(config[f"{side}_layers"])
            count = have if wanted is None else wanted
            if count < have:
                raise ValueError(
                    f"{side}_layers is {count}, expected at least the {have} that the source has"
                )
            # Spread evenly, as a trained model's work is over its depth.
            sources[side] = [index * have // count for index in range(count)]
        plan = cls(sources)
        if how.width == 1 and all(len(s) == config[f"{k}_layers"] for k, s in sources.items()):
            raise ValueError("nothing to enlarge: give a width above 1 or more layers")
        return plan

    def copies(self, side: str, layer: int) -> list[int]:
        """Where all copies are, the working one first."""
        return [index for index, source in enumerate(self.sources[side]) if source == layer]


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{source} is no Hugging Face model folder: no config.json") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "whisper":
        raise ValueError(f"{path} has model_type {kind!r}, expected 'whisper'")
    return config


def _write_weights(
    source: Path, folder: Path, plan: _LayerPlan, width: int, progress: bool
) -> None:
    """Write all tensors, in files of about `_SHARD_BYTES` each, and their index."""
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in _weight_files(source)]
        slices = {
            name: (file, file.get_slice(name)) for file in files for name in sorted(file.keys())
        }
        # The output projection is tied to the embedding.
        slices.pop("proj_out.weight", None)
        if "model.decoder.embed_tokens.weight" not in slices:
            raise ValueError(f"{source} has no model.decoder.embed_tokens.weight; is it a Whisper?")
        sizes = {}
        for name, (_, view) in slices.items():
            shape = _widened_shape(name, tuple(view.get_shape()), width)
            sizes[name] = 4 * torch.Size(shape).numel()
        total = sum(size * len(_names(name, plan)) for name, size in sizes.items())
        free = shutil.disk_usage(folder).free
        if free < total:
            raise OSError(f"{folder.parent} has {free / 1e6:.0f} MB free, {total / 1e6:.0f} needed")
        writer = _ShardWriter(folder)
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="enlarging", disable=not progress
        ) as bar:
            for name, (file, _) in slices.items():
                tensor = widened(name, file.get_tensor(name).float(), width)
                for copy, (to, works) in enumerate(_names(name, plan)):
                    kept = tensor if works else torch.zeros_like(tensor)
                    # Files hold their tensors apart: the same memory twice is refused.
                    writer.add(to, kept.clone() if copy and works else kept)
                    bar.update(sizes[name])
        writer.finish(total)


def _weight_files(source: Path) -> list[Path]:
    index = source / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [source / name for name in sorted(names)]
    return [source / "model.safetensors"]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; expected a folder with safetensors") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _names(name: str, plan: _LayerPlan) -> list[tuple[str, bool]]:
    """The names that a source tensor is written under, and whether its values are kept there."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return [(name, True)]
    side, layer, rest = match.groups()
    output = rest.rpartition(".")[0] in _OUTPUTS
    copies = plan.copies(side, int(layer))
    return [
        (f"model.{side}.layers.{index}.{rest}", index == copies[0] or not output)
        for index in copies
    ]


def _repeats(name: str, rank: int) -> tuple[tuple[bool, ...], bool]:
    """Which dimensions of a tensor are channels, and whether its values are divided by width."""
    parent, _, kind = name.rpartition(".")
    module = parent.rpartition(".")[2]
    if parent == "model.decoder.layer_norm":
        return (True,), True
    if kind == "bias" or module.endswith("layer_norm"):
        return (True,), False
    if module in ("embed_tokens", "embed_positions"):
        return (False, True), False
    if module == "conv1":  # its inputs are mel bins
        return (True, False, False), False
    if module == "conv2":
        return (True, True, False), True
    if module.endswith("_proj") or module in ("fc1", "fc2"):
        return (True, True), True
    raise ValueError(f"unknown tensor {name!r} of rank {rank}: not a Whisper of transformers")


def _widened_shape(name: str, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    channels, _ = _repeats(name, len(shape))
    if len(channels) != len(shape):
        raise ValueError(f"{name} has shape {list(shape)}, expected {len(channels)} dimensions")
    return tuple(n * width if wide else n for n, wide in zip(shape, channels, strict=True))


def widened(name: str, tensor: torch.Tensor, width: int) -> torch.Tensor:
    """A Whisper weight for `width` copies of every channel.

    Args:
        name: in transformers' naming, such as "model.encoder.conv1.weight".
        tensor: fp32, with the output dimension first.
    Raises:
        ValueError: Whisper has no such weight.
    """
    channels, divided = _repeats(name, tensor.ndim)
    wide = tensor.repeat(*(width if repeated else 1 for repeated in channels))
    return wide.div_(width) if divided else wide


class _ShardWriter:
    """Safetensors files of bounded size and the index that transformers and SGLang read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._pending[name] = tensor
        self._bytes += tensor.nbytes
        if self._bytes >= _SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            save_file(self._pending, self._folder / f"{len(self._files)}", {"format": "pt"})
            self._files.append(list(self._pending))
            self._pending, self._bytes = {}, 0

    def finish(self, total_bytes: int) -> None:
        """Give the files the names that say how many there are."""
        self._flush()
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._files):
            final = f"model-{index + 1:05}-of-{len(self._files):05}.safetensors"
            (self._folder / f"{index}").rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(self._folder / "model.safetensors.index.json", content)


# Tokenizer and feature extractor stay as they are.
_COPIED = (
    "*tokenizer*.json", "*processor_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "normalizer.json",
)  # fmt: skip


def _copy_other_files(source: Path, folder: Path, plan: _LayerPlan) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    path = source / "generation_config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("alignment_heads"):
            # The first copy of a head keeps its number.
            config["alignment_heads"] = [
                [plan.copies("decoder", layer)[0], head]
                for layer, head in config["alignment_heads"]
            ]
        _write_json(folder / path.name, config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
