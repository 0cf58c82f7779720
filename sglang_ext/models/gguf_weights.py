"""GGUF -> a Hugging Face directory: weights dequantized to fp32, config and tokenizer rebuilt.

Covers the Llama and Qwen2 architectures with byte-level BPE vocabularies. Format and key names:
GGUF specification (ggml-org/ggml, docs/gguf.md). Neither torch nor transformers is needed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# GGUF's token types, as llama.cpp numbers them.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# How text is cut before the merges apply, by GGUF's name for it. GGUF gives the name only.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {**_BYTE_LEVEL, "use_regex": True},
    ],
    "qwen2": [
        {
            "type": "Split",
            "pattern": {"Regex": _QWEN2_WORDS},
            "behavior": "Isolated",
            "invert": False,
        },
        {**_BYTE_LEVEL, "use_regex": False},
    ],
}
_NORMALIZERS = {"qwen2": {"type": "NFC"}}


def convert(source_dir: Path, out_dir: Path, eos_tokens: Sequence[str]) -> None:
    """Convert `source_dir`/model.gguf into a directory that SGLang and transformers load.

    Args:
        eos_tokens: tokens that end an answer; the first is the tokenizer's EOS.
    Raises:
        ValueError: the file is not GGUF, or of a kind that is not covered.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source_dir / "model.gguf")
    meta = {name: field.contents() for name, field in reader.fields.items()}
    architecture = meta.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {architecture!r} (covered: {', '.join(_ARCHITECTURES)})"
        )
    vocab = {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])}
    if missing := [token for token in eos_tokens if token not in vocab]:
        raise ValueError(f"the vocabulary has no {missing[0]!r}, which should end answers")
    eos_ids = [vocab[token] for token in eos_tokens]

    tensors = _read_tensors(reader, meta)
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    config = _model_config(meta, eos_ids, tied="lm_head.weight" not in tensors)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", _token_ids(meta, eos_ids))
    _write_json(out_dir / "tokenizer.json", _tokenizer(meta))
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(meta, eos_tokens[0]))


def _read_tensors(reader: Any, meta: dict[str, Any]) -> dict[str, "np.ndarray"]:
    """All weights in fp32 under Hugging Face's names, matrices as [out, in]."""
    import numpy as np
    from gguf.quants import dequantize

    arch = meta["general.architecture"]
    heads = {
        "attn_q": meta[f"{arch}.attention.head_count"],
        "attn_k": meta[f"{arch}.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            raise ValueError("scaled RoPE (rope_freqs.weight) is not covered")
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if arch == "llama" and part in heads:
            weight = _unpermute(weight, heads[part])
        tensors[_tensor_name(tensor.name)] = np.ascontiguousarray(weight)
    return tensors


def _tensor_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor: blk.0.attn_q.weight -> model.layers.0.self_attn..."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _LAYER_NAMES:
        return f"model.layers.{pieces[1]}.{_LAYER_NAMES[pieces[2]]}.{pieces[3]}"
    raise ValueError(f"tensor {name!r} has no place in a Llama or Qwen2 model")


def _unpermute(weight: "np.ndarray", heads: int) -> "np.ndarray":
    """Undo llama.cpp's reordering of rows for RoPE: pairs (i, i + d/2) lie together there.

    Args:
        weight: [heads * head_dim, in].
    """
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _model_config(meta: dict[str, Any], eos_ids: list[int], tied: bool) -> dict[str, Any]:
    arch = meta["general.architecture"]
    get = {key.removeprefix(f"{arch}."): value for key, value in meta.items()}
    heads = get["attention.head_count"]
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        **_token_ids(meta, eos_ids),
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": get["embedding_length"],
        "intermediate_size": get["feed_forward_length"],
        "num_hidden_layers": get["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": get["attention.head_count_kv"],
        "head_dim": get["embedding_length"] // heads,
        "max_position_embeddings": get["context_length"],
        "rms_norm_eps": _decimal(get["attention.layer_norm_rms_epsilon"]),
        "rope_theta": get["rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def _decimal(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 9.99999974e-06 -> 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def _token_ids(meta: dict[str, Any], eos_ids: list[int]) -> dict[str, Any]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE, with the special tokens marked as such."""
    kind, pre = meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} "
            f"(covered: 'gpt2' with {', '.join(_PRE_TOKENIZERS)})"
        )
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, token, special=kind == _CONTROL)
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": _NORMALIZERS.get(pre),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            # Unused entries only pad the embedding matrix to a round size.
            "vocab": {
                token: index
                for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
                if kind != _UNUSED
            },
            "merges": meta["tokenizer.ggml.merges"],
        },
    }


def _added_token(index: int, content: str, special: bool) -> dict[str, Any]:
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _tokenizer_config(meta: dict[str, Any], eos_token: str) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    config = {
        # Not the model's own class: transformers 5 gives those a pre-tokenizer of their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "model_max_length": meta[f"{meta['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    if meta.get("tokenizer.ggml.add_bos_token") or "tokenizer.ggml.unknown_token_id" in meta:
        config["bos_token"] = tokens[meta["tokenizer.ggml.bos_token_id"]]
    if "tokenizer.ggml.unknown_token_id" in meta:
        config["unk_token"] = tokens[meta["tokenizer.ggml.unknown_token_id"]]
    return config


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, indent=2)
