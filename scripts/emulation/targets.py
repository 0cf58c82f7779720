"""Small `config.json` of the kinds of targets, for what depends on a target's kind only.

SGLang's real ModelConfig reads them; there are no weights. Each says what our code must find out
about it (the fields of sglang_ext.cuda.backends.TargetFacts that are true).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

_PLAIN = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]

# Name: (model_type, architecture, what differs from a plain Llama, facts that are true).
_KINDS: dict[str, tuple[str, str, dict[str, Any], frozenset[str]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}, frozenset()),
    "mistral": ("mistral", "MistralForCausalLM", {"sliding_window": None}, frozenset()),
    "mistral, window": (
        "mistral",
        "MistralForCausalLM",
        {"sliding_window": 4096},
        frozenset({"window"}),
    ),
    "gemma-2": (
        "gemma2",
        "Gemma2ForCausalLM",
        {"sliding_window": 4096, "hidden_act": "gelu_pytorch_tanh"},
        frozenset({"window"}),
    ),
    "gemma-3": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"sliding_window": 512, "layer_types": _SLIDING_THEN_FULL},
        frozenset({"window"}),
    ),
    "qwen2": (
        "qwen2",
        "Qwen2ForCausalLM",
        {"use_sliding_window": False, "sliding_window": 4096},
        frozenset(),
    ),
    "qwen2, window": (
        "qwen2",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
        frozenset({"window"}),
    ),
    "deepseek-v2": ("deepseek_v2", "DeepseekV2ForCausalLM", _LATENT, frozenset({"mla"})),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3ForCausalLM", _LATENT, frozenset({"mla"})),
    "gpt-oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        {"sliding_window": 128, "layer_types": _SLIDING_THEN_FULL},
        frozenset({"window", "sinks"}),
    ),
    "whisper": (
        "whisper",
        "WhisperForConditionalGeneration",
        {
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_source_positions": 1500,
            "max_target_positions": 448,
        },
        frozenset({"encoder_decoder"}),
    ),
}

KINDS = tuple(_KINDS)


def facts_expected(kind: str) -> frozenset[str]:
    """The facts that are true of this kind of target."""
    return _KINDS[kind][3]


def model_config(kind: str, folder: Path, **changes: Any) -> Any:
    """SGLang's ModelConfig of this kind of target.

    Args:
        folder: where its `config.json` is written.
        changes: entries of `config.json` to add or replace.
    """
    from sglang.srt.configs.model_config import ModelConfig

    model_type, architecture, differences, _ = _KINDS[kind]
    config = {"model_type": model_type, "architectures": [architecture]}
    path = folder / kind.replace(", ", "-")
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_PLAIN | config | differences | changes))
    return ModelConfig(str(path))


def wrong_targets() -> list[str]:
    """Targets with a window, latent attention or sinks that FlashInfer would verify, by name."""
    from sglang_ext.cuda.backends import facts_of, reaches_flashinfer

    with tempfile.TemporaryDirectory() as folder:
        facts = [facts_of(model_config(kind, Path(folder))) for kind in KINDS]
    return reaches_flashinfer(facts)
