"""What Whisper targets need: slots after the encoder's, features, key biases."""

from types import SimpleNamespace

import torch

from sglang_ext import encoder_decoder


def test_decoder_tokens_are_stored_after_the_encoders():
    batch = SimpleNamespace(
        seq_lens=torch.tensor([5, 7]), encoder_lens=torch.tensor([1500, 0]), reqs=[1, 2]
    )
    assert encoder_decoder.decoder_starts(batch).tolist() == [1505, 7]
    encoder_decoder.keep_encoder_outputs(batch)
    assert batch.encoder_cached == [True, True]


def test_decoder_only_models_are_left_alone():
    batch = SimpleNamespace(seq_lens=torch.tensor([5]), encoder_lens=None, reqs=[1])
    assert encoder_decoder.decoder_starts(batch) is batch.seq_lens
    encoder_decoder.keep_encoder_outputs(batch)
    assert not hasattr(batch, "encoder_cached")


def with_items(*items):
    return SimpleNamespace(multimodal_inputs=SimpleNamespace(mm_items=list(items)))


def test_features_for_the_draft_model_go_before_the_targets():
    own, drafts = torch.zeros(1, 128, 3000), torch.ones(80, 3000)
    item = SimpleNamespace(feature=own, model_specific_data={})
    assert encoder_decoder.audio_features(with_items(item)).shape == (128, 3000)
    item.model_specific_data["draft_features"] = drafts
    assert encoder_decoder.audio_features(with_items(item)).equal(drafts)


def test_requests_of_text_have_no_features():
    assert encoder_decoder.audio_features(SimpleNamespace(multimodal_inputs=None)) is None
    assert encoder_decoder.audio_features(with_items()) is None


def test_key_biases_are_zeroed_before_weights_are_loaded():
    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(4, 12)}),
            "fc1": torch.nn.Linear(4, 4),
        }
    )
    before = model["fc1"].bias.clone()
    encoder_decoder._zero_key_biases(model)
    assert not model["a"]["qkv_proj"].bias.any() and model["fc1"].bias.equal(before)
