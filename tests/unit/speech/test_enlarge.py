"""Enlarging a small random Whisper: transformers computes the same from both folders."""

import json
from pathlib import Path

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from speech import enlarge as module
from speech.enlarge import Enlargement, enlarge

ENCODER_LAYERS, DECODER_LAYERS, D_MODEL, VOCAB = 2, 3, 16, 60


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCAB, d_model=D_MODEL, encoder_layers=ENCODER_LAYERS,
        decoder_layers=DECODER_LAYERS, num_mel_bins=8, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=32, max_source_positions=10,
        max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        decoder_start_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        # No zeros and ones that would hide a bias or a norm's weights forgotten.
        parameter.data = torch.randn_like(parameter).mul(0.4)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    generation = {"alignment_heads": [[0, 1], [2, 3]], "suppress_tokens": [5]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_text('{"any": "content"}')
    (folder / "sglang_ext_manifest.json").write_text("{}")
    return folder


def logits(folder: Path) -> torch.Tensor:
    """float64: of one fixed input, so that only a wrong function differs."""
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval().double()
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 8, 20, generator=generator, dtype=torch.float64)
    tokens = torch.tensor([[2, 5, 9, 30], [2, 7, 7, 59]])
    with torch.no_grad():
        return model(features, decoder_input_ids=tokens).logits


@pytest.mark.parametrize(
    "how",
    [
        Enlargement(width=2),
        Enlargement(width=3),
        Enlargement(width=1, decoder_layers=7),
        Enlargement(width=1, encoder_layers=5),
        Enlargement(width=2, encoder_layers=3, decoder_layers=12),
    ],
    ids=str,
)
def test_the_enlarged_model_computes_the_same(source, tmp_path, how):
    enlarge(source, tmp_path / "large", how)
    torch.testing.assert_close(logits(tmp_path / "large"), logits(source), rtol=1e-5, atol=1e-5)
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path / "large")
    assert model.config.d_model == D_MODEL * how.width
    assert len(model.model.encoder.layers) == (how.encoder_layers or ENCODER_LAYERS)
    assert len(model.model.decoder.layers) == (how.decoder_layers or DECODER_LAYERS)
    attention = model.model.decoder.layers[0].self_attn
    assert (attention.num_heads, attention.head_dim) == (4 * how.width, 4)
    assert model.model.decoder.layers[0].fc1.out_features == 32 * how.width


def test_extra_layers_do_all_the_work_and_add_zero(source, tmp_path):
    """A layer of zeros would be a cheaper model on a machine that skips zeros."""
    enlarge(source, tmp_path / "large", Enlargement(width=2, decoder_layers=6))
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path / "large")
    works = []
    for layer in model.model.decoder.layers:
        outputs = (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2)
        works.append({bool(p.any()) for linear in outputs for p in (linear.weight, linear.bias)})
        inputs = (layer.self_attn.q_proj, layer.encoder_attn.v_proj, layer.fc1)
        assert all(linear.weight.count_nonzero() == linear.weight.numel() for linear in inputs)
    assert works == [{True}, {False}] * 3


def test_other_files_come_along_and_say_what_it_is(source, tmp_path):
    how = Enlargement(width=2, decoder_layers=9)
    enlarge(source, tmp_path / "large", how, name="whisper-tiny")
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert config["enlarged_from"] == {
        "name": "whisper-tiny", "width": 2, "encoder_layers": 2, "decoder_layers": 9
    }  # fmt: skip
    loaded = WhisperConfig.from_pretrained(tmp_path / "large")
    assert loaded.enlarged_from["name"] == "whisper-tiny"
    generation = json.loads((tmp_path / "large" / "generation_config.json").read_text())
    # Layer 2 is now layer 6; a head's first copy keeps its number.
    assert generation == {"alignment_heads": [[0, 1], [6, 3]], "suppress_tokens": [5]}
    assert (tmp_path / "large" / "tokenizer.json").read_text() == '{"any": "content"}'
    # The manifest describes the source's files.
    assert not (tmp_path / "large" / "sglang_ext_manifest.json").exists()


def test_weights_in_several_files_are_written_and_read(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD_BYTES", 20_000)
    enlarge(source, tmp_path / "once", Enlargement(width=2))
    assert len(list((tmp_path / "once").glob("model-*.safetensors"))) > 2
    enlarge(tmp_path / "once", tmp_path / "twice", Enlargement(width=2))
    torch.testing.assert_close(logits(tmp_path / "twice"), logits(source), rtol=1e-5, atol=1e-5)


def test_an_existing_target_is_refused_and_left_alone(source, tmp_path):
    (tmp_path / "large").mkdir()
    with pytest.raises(FileExistsError, match="choose another folder"):
        enlarge(source, tmp_path / "large")
    assert list((tmp_path / "large").iterdir()) == []


def test_nothing_is_left_of_a_failure(source, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        enlarge(source, tmp_path / "large")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_before_writing(source, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="MB free"):
        enlarge(source, tmp_path / "large")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (Enlargement(width=0), "width is 0, expected 1 or more"),
        (Enlargement(width=1), "nothing to enlarge"),
        (Enlargement(decoder_layers=2), "decoder_layers is 2, expected at least the 3"),
    ],
)
def test_impossible_requests_are_refused(source, tmp_path, how, message):
    with pytest.raises(ValueError, match=message):
        enlarge(source, tmp_path / "large", how)


def test_sources_that_are_no_whisper_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        enlarge(tmp_path, tmp_path / "large")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type 'llama', expected 'whisper'"):
        enlarge(tmp_path, tmp_path / "large")


def test_damaged_weights_are_named(source, tmp_path):
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        enlarge(tmp_path, tmp_path / "large")
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        enlarge(tmp_path, tmp_path / "large")
