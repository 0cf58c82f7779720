"""Tiny random causal language models on disk, and what transformers makes of them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

VOCAB = 160
_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def write_lm(folder: Path, kind: str = "llama", seed: int = 0, **changes) -> Path:
    """A random model of three layers, biases and norms random too."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": kind == "llama",
    }  # fmt: skip
    if kind == "qwen3":
        sizes["head_dim"] = 32
    config = _CONFIGS[kind](**(sizes | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(folder)
    return folder


class Reference:
    """transformers' greedy continuation of a text."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def continued(self, text: Sequence[int], tokens: int) -> list[int]:
        """The next `tokens` tokens, each the likeliest."""
        out = list(text)
        for _ in range(tokens):
            out.append(int(self._model(torch.tensor([out])).logits[0, -1].argmax()))
        return out[len(text) :]

    @torch.inference_mode()
    def best(self, text: Sequence[int]) -> tuple[int, float]:
        """The likeliest next token and its probability."""
        probs = self._model(torch.tensor([list(text)])).logits[0, -1].softmax(-1)
        return int(probs.argmax()), float(probs.max())

    @torch.inference_mode()
    def likeliest(self, text: Sequence[int], most: int) -> tuple[list[int], list[float]]:
        """The likeliest next tokens and their probabilities, the best first."""
        probs = self._model(torch.tensor([list(text)])).logits[0, -1].softmax(-1)
        best = probs.topk(most)
        return best.indices.tolist(), best.values.tolist()
