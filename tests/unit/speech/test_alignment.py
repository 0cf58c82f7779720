"""A Hugging Face Whisper becomes openai-whisper's, weight by weight."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import WhisperConfig, WhisperModel

from speech.alignment import Aligner, load_whisper, renamed

CONFIG = {
    "d_model": 64, "vocab_size": 51_865, "num_mel_bins": 80, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "max_source_positions": 1500,
    "max_target_positions": 448,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Whisper with random weights."""
    folder = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    model = WhisperModel(WhisperConfig(**CONFIG)).eval()
    weights = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": [[1, 0]]}))
    return folder


def test_both_compute_the_same(folder):
    theirs = WhisperModel(WhisperConfig(**CONFIG)).eval()
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    theirs.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()})
    ours = load_whisper(folder)
    mel, tokens = torch.randn(1, 80, 3000), torch.tensor([[50258, 50259, 50359, 50363, 400]])
    with torch.inference_mode():
        hidden = theirs(input_features=mel, decoder_input_ids=tokens).last_hidden_state
        expected = hidden @ weights["model.decoder.embed_tokens.weight"].T
        torch.testing.assert_close(ours(mel, tokens), expected, atol=1e-4, rtol=1e-4)


def test_alignment_heads_come_from_the_generation_config(folder):
    assert load_whisper(folder).alignment_heads.to_dense().tolist() == [
        [False, False],
        [True, False],
    ]


def test_other_weights_are_refused(folder, tmp_path):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    save_file({"model.something": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no Whisper that openai-whisper could load"):
        load_whisper(tmp_path)


def test_names():
    assert renamed("model.decoder.layers.3.encoder_attn.q_proj.weight") == (
        "decoder.blocks.3.cross_attn.query.weight"
    )
    assert renamed("model.encoder.embed_positions.weight") == "encoder.positional_embedding"


def test_which_languages_it_speaks(folder):
    aligner = Aligner(folder)
    assert aligner.speaks("fr") and not aligner.speaks("yue")
