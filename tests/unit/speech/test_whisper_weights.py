"""Converting a small random Whisper: transformers must compute what its own weights give.

The model is made by transformers, written as CTranslate2 would, converted back, and compared by
output. That checks names, the splitting of fused projections and the configuration files at once.
"""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, WhisperConfig, WhisperForConditionalGeneration

from speech.whisper_weights import _with_first_merge, convert
from tests.unit.speech.ctranslate2_files import model_file

SPECIALS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|fr|>", "<|translate|>"]
SPECIALS += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nocaptions|>"]
SPECIALS += ["<|notimestamps|>"]
TEXT_TOKENS = 256
VOCAB = TEXT_TOKENS + len(SPECIALS) + 1501


def tokenizer_json() -> dict:
    """A byte-level vocabulary without merges, and special tokens but no timestamps."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {char: index for index, char in enumerate(bytes_to_unicode().values())}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": TEXT_TOKENS + i, "content": token, **flags, "special": True}
            for i, token in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


@pytest.fixture(scope="module")
def reference() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=2, decoder_layers=3, num_mel_bins=8,
        encoder_attention_heads=2, decoder_attention_heads=4, encoder_ffn_dim=24,
        decoder_ffn_dim=32, max_source_positions=10, max_target_positions=12,
        pad_token_id=TEXT_TOKENS, bos_token_id=TEXT_TOKENS, eos_token_id=TEXT_TOKENS,
        decoder_start_token_id=TEXT_TOKENS + 1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        # Values that fp16 holds exactly, and no zeros that would hide a missing bias.
        parameter.data = torch.randn_like(parameter).mul(0.3).half().float()
    return model


def ctranslate2_variables(model: WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    """The model's weights in CTranslate2's names and fusions, fp16."""
    state = {key.removeprefix("model."): value for key, value in model.state_dict().items()}
    half: Callable = lambda *t: torch.cat(t).half().numpy()  # noqa: E731
    out: dict[str, np.ndarray] = {}

    def linear(to: str, *names: str) -> None:
        out[f"{to}/weight"] = half(*(state[f"{name}.weight"] for name in names))
        biases = (state.get(f"{n}.bias", torch.zeros(len(state[f"{n}.weight"]))) for n in names)
        out[f"{to}/bias"] = half(*biases)

    def norm(to: str, name: str) -> None:
        out[f"{to}/gamma"] = half(state[f"{name}.weight"])
        out[f"{to}/beta"] = half(state[f"{name}.bias"])

    for conv in ("conv1", "conv2"):
        linear(f"encoder/{conv}", f"encoder.{conv}")
    for side, layers, heads in (("encoder", 2, 2), ("decoder", 3, 4)):
        out[f"{side}/num_heads"] = np.array(heads, dtype=np.int16)
        out[f"{side}/position_encodings/encodings"] = half(state[f"{side}.embed_positions.weight"])
        norm(f"{side}/layer_norm", f"{side}.layer_norm")
        for i in range(layers):
            to, name = f"{side}/layer_{i}", f"{side}.layers.{i}"
            norm(f"{to}/self_attention/layer_norm", f"{name}.self_attn_layer_norm")
            linear(f"{to}/self_attention/linear_0", *(f"{name}.self_attn.{p}_proj" for p in "qkv"))
            linear(f"{to}/self_attention/linear_1", f"{name}.self_attn.out_proj")
            if side == "decoder":
                norm(f"{to}/attention/layer_norm", f"{name}.encoder_attn_layer_norm")
                linear(f"{to}/attention/linear_0", f"{name}.encoder_attn.q_proj")
                linear(f"{to}/attention/linear_1", *(f"{name}.encoder_attn.{p}_proj" for p in "kv"))
                linear(f"{to}/attention/linear_2", f"{name}.encoder_attn.out_proj")
            norm(f"{to}/ffn/layer_norm", f"{name}.final_layer_norm")
            linear(f"{to}/ffn/linear_0", f"{name}.fc1")
            linear(f"{to}/ffn/linear_1", f"{name}.fc2")
    out["decoder/embeddings/weight"] = half(state["decoder.embed_tokens.weight"])
    return out


@pytest.fixture
def source(tmp_path, reference):
    """A function that writes a source folder, with variables changed or left out (None)."""

    def write(**changes: np.ndarray | None):
        folder = tmp_path / "source"
        folder.mkdir()
        variables = {**ctranslate2_variables(reference), **changes}
        kept = {name: array for name, array in variables.items() if array is not None}
        aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
        (folder / "model.bin").write_bytes(model_file(kept, aliases))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        config = {"alignment_heads": [[1, 2]], "suppress_ids": [3], "suppress_ids_begin": [5, 6]}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def test_converted_model_computes_the_same(source, tmp_path, reference):
    convert(source(), tmp_path)
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert model.dtype == torch.float32
    features = torch.randn(1, 8, 20)
    tokens = torch.tensor([[TEXT_TOKENS + 1, 5, 9, 200]])
    with torch.no_grad():
        expected = reference(features, decoder_input_ids=tokens).logits
        actual = model(features, decoder_input_ids=tokens).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_processor_knows_timestamps_and_special_tokens(source, tmp_path):
    convert(source(), tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    tokenizer = processor.tokenizer
    assert processor.feature_extractor.feature_size == 8
    first = TEXT_TOKENS + len(SPECIALS)
    assert tokenizer.convert_tokens_to_ids(["<|0.00|>", "<|0.02|>", "<|30.00|>"]) == [
        first, first + 1, first + 1500
    ]  # fmt: skip
    ids = [TEXT_TOKENS + 1, TEXT_TOKENS + 2, first, ord("h") - 33, ord("i") - 33, first + 50]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"
    timed = tokenizer.decode(ids, decode_with_timestamps=True)
    assert timed == "<|startoftranscript|><|en|><|0.00|>hi<|1.00|>"


def test_generation_config_comes_from_tokenizer_and_source(source, tmp_path):
    convert(source(), tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    assert config["alignment_heads"] == [[1, 2]]
    assert (config["suppress_tokens"], config["begin_suppress_tokens"]) == ([3], [5, 6])
    assert config["eos_token_id"] == TEXT_TOKENS
    assert config["decoder_start_token_id"] == TEXT_TOKENS + 1
    assert config["no_timestamps_token_id"] == TEXT_TOKENS + len(SPECIALS) - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder/layer_2/ffn/linear_1/bias": None}, "no floating-point variable .*layer_2"),
        ({"encoder/conv3/weight": np.ones(2, np.float16)}, "unknown variables: encoder/conv3"),
        (
            {"encoder/layer_0/self_attention/linear_0/bias": np.ones(48, np.float16)},
            "bias on keys",
        ),
    ],
)
def test_other_models_are_refused(source, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        convert(source(**changes), tmp_path)


def test_vocabulary_that_does_not_fit_is_refused(source, tmp_path):
    embedding = np.ones((VOCAB + 1, 16), np.float16)
    with pytest.raises(ValueError, match=f"{VOCAB} tokens and the model {VOCAB + 1}"):
        convert(source(**{"decoder/embeddings/weight": embedding}), tmp_path)


def test_other_kind_of_model_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(model_file({}, spec="TransformerSpec"))
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="'TransformerSpec', expected 'WhisperSpec'"):
        convert(tmp_path, tmp_path)


def test_a_first_merge_that_was_dropped_comes_back():
    bytes_ = {chr(0x100 + i): i for i in range(256)}
    vocab = {**bytes_, "ĀĂ": 256, "ĀĂĄ": 257}
    whole = {"model": {"vocab": vocab, "merges": ["Ā Ă", "ĀĂ Ą"]}}
    assert _with_first_merge(whole) is whole
    cut = {"model": {"vocab": vocab, "merges": ["ĀĂ Ą"]}}
    assert _with_first_merge(cut)["model"]["merges"] == [("Ā", "Ă"), ("ĀĂ", "Ą")]
