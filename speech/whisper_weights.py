"""Whisper as CTranslate2 stores it -> a Hugging Face directory (WhisperForConditionalGeneration).

Weights are renamed, the fused projections split, and all is widened to fp32. The configuration
files say what OpenAI's own Hugging Face repositories say, derived from the weights' shapes, the
tokenizer's special tokens and CTranslate2's config.json.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from speech.ctranslate2 import CTranslate2Model, read_model

# Of every Whisper model ("Robust Speech Recognition via Large-Scale Weak Supervision", 2.2).
_SAMPLE_RATE = 16_000
_HOP_SAMPLES = 160
_FFT_SAMPLES = 400
_CHUNK_SECONDS = 30
_TIMESTAMP_COUNT = 1501  # <|0.00|> to <|30.00|> in steps of 0.02 s
_MAX_INITIAL_TIMESTAMP = 50  # the first timestamp is at most 1 s


def convert(source_dir: Path, out_dir: Path) -> None:
    """Convert `source_dir`'s model.bin, tokenizer.json and config.json into `out_dir`.

    Raises:
        ValueError: a file is damaged, or the model is not Whisper as CTranslate2 writes it.
    """
    from safetensors.numpy import save_file

    model = read_model(source_dir / "model.bin")
    tokenizer = json.loads((source_dir / "tokenizer.json").read_text(encoding="utf-8"))
    source_config = json.loads((source_dir / "config.json").read_text(encoding="utf-8"))

    tensors = hf_tensors(model)
    tokenizer, ids = _with_timestamps(_with_first_merge(tokenizer))
    config = _model_config(model, tensors, ids)
    if len(ids) != config["vocab_size"]:
        raise ValueError(
            f"the tokenizer has {len(ids)} tokens and the model {config['vocab_size']}"
        )
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("config.json", config),
        ("generation_config.json", _generation_config(config, source_config, ids)),
        ("preprocessor_config.json", _preprocessor_config(config)),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", _tokenizer_config(tokenizer)),
    ):
        with (out_dir / name).open("w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=2)


def hf_tensors(model: CTranslate2Model) -> dict[str, np.ndarray]:
    """All weights in fp32 under transformers' names; the tied output projection is left out.

    Raises:
        ValueError: the model is of another kind, or has variables missing, unknown or quantized.
    """
    if model.spec != "WhisperSpec":
        raise ValueError(f"a CTranslate2 model of kind {model.spec!r}, expected 'WhisperSpec'")
    source = _Weights(model)
    out: dict[str, np.ndarray] = {}
    for side in ("encoder", "decoder"):
        prefix = f"model.{side}"
        out[f"{prefix}.embed_positions.weight"] = source.take(
            f"{side}/position_encodings/encodings"
        )
        out |= source.norm(f"{side}/layer_norm", f"{prefix}.layer_norm")
        for index in range(_layer_count(model, side)):
            layer, to = f"{side}/layer_{index}", f"{prefix}.layers.{index}"
            out |= source.norm(f"{layer}/self_attention/layer_norm", f"{to}.self_attn_layer_norm")
            out |= source.fused(f"{layer}/self_attention/linear_0", f"{to}.self_attn", "qkv")
            out |= source.linear(f"{layer}/self_attention/linear_1", f"{to}.self_attn.out_proj")
            if side == "decoder":
                out |= source.norm(f"{layer}/attention/layer_norm", f"{to}.encoder_attn_layer_norm")
                out |= source.linear(f"{layer}/attention/linear_0", f"{to}.encoder_attn.q_proj")
                out |= source.fused(f"{layer}/attention/linear_1", f"{to}.encoder_attn", "kv")
                out |= source.linear(f"{layer}/attention/linear_2", f"{to}.encoder_attn.out_proj")
            out |= source.norm(f"{layer}/ffn/layer_norm", f"{to}.final_layer_norm")
            out |= source.linear(f"{layer}/ffn/linear_0", f"{to}.fc1")
            out |= source.linear(f"{layer}/ffn/linear_1", f"{to}.fc2")
    for conv in ("conv1", "conv2"):
        out |= source.linear(f"encoder/{conv}", f"model.encoder.{conv}")
    out["model.decoder.embed_tokens.weight"] = source.take("decoder/embeddings/weight")
    source.check_all_taken()
    return out


class _Weights:
    """A model's floating-point variables, each to be taken once."""

    def __init__(self, model: CTranslate2Model) -> None:
        # Integers of rank 0 or 1 are settings (heads, flags), and the projection is an alias.
        self._left = {
            name: array
            for name, array in model.variables.items()
            if array.dtype.kind == "f" and name != "decoder/projection/weight"
        }

    def take(self, name: str) -> np.ndarray:
        if name not in self._left:
            raise ValueError(f"the Whisper model has no floating-point variable {name!r}")
        return np.ascontiguousarray(self._left.pop(name), dtype=np.float32)

    def linear(self, name: str, to: str) -> dict[str, np.ndarray]:
        return {
            f"{to}.weight": self.take(f"{name}/weight"),
            f"{to}.bias": self.take(f"{name}/bias"),
        }

    def norm(self, name: str, to: str) -> dict[str, np.ndarray]:
        return {f"{to}.weight": self.take(f"{name}/gamma"), f"{to}.bias": self.take(f"{name}/beta")}

    def fused(self, name: str, to: str, parts: str) -> dict[str, np.ndarray]:
        """Split rows [len(parts) * d_model, ...] into q_proj, k_proj, v_proj."""
        out = {}
        weights = np.split(self.take(f"{name}/weight"), len(parts))
        biases = np.split(self.take(f"{name}/bias"), len(parts))
        for part, weight, bias in zip(parts, weights, biases, strict=True):
            out[f"{to}.{part}_proj.weight"] = np.ascontiguousarray(weight)
            if part != "k":
                out[f"{to}.{part}_proj.bias"] = np.ascontiguousarray(bias)
            elif bias.any():
                raise ValueError(f"{name} has a bias on keys; Whisper has none")
        return out

    def check_all_taken(self) -> None:
        if self._left:
            raise ValueError(f"the Whisper model has unknown variables: {', '.join(self._left)}")


def _layer_count(model: CTranslate2Model, side: str) -> int:
    """How many layers the variables named SIDE/layer_N/... make."""
    parts = {name.split("/")[1] for name in model.variables if name.startswith(f"{side}/")}
    return sum(part.removeprefix("layer_").isdigit() for part in parts)


def _with_first_merge(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer with its first merge, which some converters take for a header and drop.

    Byte-level BPE has 256 tokens of one byte and then one token for each merge, in their order.
    Without the first merge ("Ġ t") every word that begins with t is encoded otherwise.
    """
    model = tokenizer["model"]
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    first = next((token for token, index in model["vocab"].items() if index == 256), "")
    if len(first) != 2 or tuple(first) in merges:
        return tokenizer
    return {**tokenizer, "model": {**model, "merges": [tuple(first), *merges]}}


def _with_timestamps(tokenizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """The tokenizer with its timestamp tokens, and all its ids by token.

    CTranslate2's converter drops the timestamps from tokenizer.json; SGLang and transformers look
    them up by name. As in OpenAI's repositories they are added tokens, but not special ones.
    """
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    added = list(tokenizer["added_tokens"])
    first = ids["<|notimestamps|>"] + 1
    for index in range(_TIMESTAMP_COUNT):
        content = f"<|{index * 0.02:.2f}|>"
        if content not in ids:
            ids[content] = first + index
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
            added.append({"id": first + index, "content": content, **flags, "special": False})
    return {**tokenizer, "added_tokens": added}, ids


def _model_config(
    model: CTranslate2Model, tensors: dict[str, np.ndarray], ids: dict[str, int]
) -> dict[str, Any]:
    vocab_size, d_model = tensors["model.decoder.embed_tokens.weight"].shape
    end = ids["<|endoftext|>"]
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "torch_dtype": "float32",
        "is_encoder_decoder": True,
        "d_model": d_model,
        "vocab_size": vocab_size,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": tensors["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": tensors["model.decoder.embed_positions.weight"].shape[0],
        "num_hidden_layers": _layer_count(model, "encoder"),
        **_side_config(model, tensors, "encoder"),
        **_side_config(model, tensors, "decoder"),
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
    }


def _side_config(
    model: CTranslate2Model, tensors: dict[str, np.ndarray], side: str
) -> dict[str, Any]:
    return {
        f"{side}_layers": _layer_count(model, side),
        f"{side}_attention_heads": int(model.variables[f"{side}/num_heads"]),
        f"{side}_ffn_dim": tensors[f"model.{side}.layers.0.fc1.weight"].shape[0],
        f"{side}_layerdrop": 0.0,
    }


def _generation_config(
    config: dict[str, Any], source_config: dict[str, Any], ids: dict[str, int]
) -> dict[str, Any]:
    # English-only models are those with the GPT-2 vocabulary: one token fewer.
    multilingual = config["vocab_size"] > 51_864
    out = {
        **{f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")},
        "decoder_start_token_id": config["decoder_start_token_id"],
        "alignment_heads": source_config["alignment_heads"],
        "suppress_tokens": source_config["suppress_ids"],
        "begin_suppress_tokens": source_config["suppress_ids_begin"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": _MAX_INITIAL_TIMESTAMP,
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
        "is_multilingual": multilingual,
    }
    if multilingual:
        languages = range(ids["<|startoftranscript|>"] + 1, ids["<|translate|>"])
        token_of = {index: token for token, index in ids.items()}
        out["lang_to_id"] = {token_of[index]: index for index in languages}
        # Without a default task transformers leaves the task token out, and the output is garbage.
        out["task"] = "transcribe"
        out["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return out


def _preprocessor_config(config: dict[str, Any]) -> dict[str, Any]:
    samples = _CHUNK_SECONDS * _SAMPLE_RATE
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": _SAMPLE_RATE,
        "hop_length": _HOP_SAMPLES,
        "n_fft": _FFT_SAMPLES,
        "chunk_length": _CHUNK_SECONDS,
        "n_samples": samples,
        "nb_max_frames": samples // _HOP_SAMPLES,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _tokenizer_config(tokenizer: dict[str, Any]) -> dict[str, Any]:
    specials = [token["content"] for token in tokenizer["added_tokens"] if token["special"]]
    end = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        # Without this list transformers takes all ids after <|endoftext|> for timestamps.
        "additional_special_tokens": specials,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "errors": "replace",
    }
