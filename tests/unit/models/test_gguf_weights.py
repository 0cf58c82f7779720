"""Converting small random GGUF files: transformers must compute what the original weights give."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sglang_ext.models.gguf_weights import convert

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "Ġa", "12"]
MERGES = ["Ġ a", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def make_model(arch: str, tied: bool):
    kind, config_kind = {
        "llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)
    }[arch]  # fmt: skip
    torch.manual_seed(0)
    config = config_kind(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=tied, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter).mul(0.2)
    return model


def gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"
    }  # fmt: skip
    stem, _, kind = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rows: of each head, rows i and i + d/2 become neighbours."""
    order = []
    dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            order += [head * dim + i, head * dim + i + dim // 2]
    return weight[order]


def write_gguf(path, model, arch: str, pre: str = "smollm", quantize: bool = False) -> None:
    """Write `model` as llama.cpp's converter would; `quantize` makes its matrices Q8_0, and sets
    the model's own weights to the values that the file then holds."""
    config = model.config
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        weight = parameter.data
        if quantize and weight.ndim == 2:
            packed = quants.quantize(weight.numpy(), GGMLQuantizationType.Q8_0)
            weight.copy_(torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType.Q8_0)))
        array = weight.numpy()
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:
            array = permute(array, heads[part])
        if quantize and array.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("arch", "tied", "quantize"),
    [("llama", True, False), ("llama", False, True), ("qwen2", True, True)],
)
def test_converted_model_computes_the_same(tmp_path, arch, tied, quantize):
    original = make_model(arch, tied)
    write_gguf(tmp_path / "model.gguf", original, arch, quantize=quantize)
    convert(tmp_path, tmp_path, eos_tokens=["<|im_end|>"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(model) is type(original)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.config.tie_word_embeddings == tied
    tokens = torch.randint(len(TOKENS), (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, original(tokens).logits)


def test_tokenizer_splits_digits_and_keeps_specials(tmp_path):
    write_gguf(tmp_path / "model.gguf", make_model("llama", True), "llama")
    convert(tmp_path, tmp_path, eos_tokens=["<|im_end|>"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("b a 12<|im_end|>é").input_ids) == [
        "b", "Ġa", "Ġ", "1", "2", "<|im_end|>", "Ã", "©"
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer("b a 12 é").input_ids) == "b a 12 é"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.model_max_length == 128
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>a<|im_end|>"


def test_several_end_tokens(tmp_path):
    write_gguf(tmp_path / "model.gguf", make_model("qwen2", True), "qwen2", pre="qwen2")
    convert(tmp_path, tmp_path, eos_tokens=["<|im_end|>", "<|endoftext|>"])
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("arch", "pre", "eos", "message"),
    [
        ("gemma", "smollm", "<|im_end|>", "architecture 'gemma'.*covered: llama, qwen2"),
        ("llama", "tekken", "<|im_end|>", "pre-tokenizer 'tekken'"),
        ("llama", "smollm", "</s>", "no '</s>'"),
    ],
)
def test_what_is_not_covered_is_named(tmp_path, arch, pre, eos, message):
    write_gguf(tmp_path / "model.gguf", make_model("llama", True), arch, pre=pre)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path, eos_tokens=[eos])


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not GGUF" * 100)
    with pytest.raises(ValueError, match="GGUF"):
        convert(tmp_path, tmp_path, eos_tokens=["<|im_end|>"])
