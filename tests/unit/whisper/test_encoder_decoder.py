"""What Whisper targets need: slots after the encoder's, features, key biases."""

from types import SimpleNamespace
from typing import Any

import torch

from sglang_ext.whisper import encoder_decoder


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


def test_the_decoder_is_timed_without_the_encoders_k_and_v(monkeypatch):
    clock = iter(range(100))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder_attn = torch.nn.ModuleDict({"kv_proj": torch.nn.Identity()})

        def forward(self, x):
            return self.encoder_attn["kv_proj"](x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Identity()
            self.decoder = torch.nn.Sequential(Layer(), Layer())
            self.logits_processor = torch.nn.Identity()

    model = Model()
    timer = encoder_decoder.DecoderTimer(model)
    monkeypatch.setattr(encoder_decoder.time, "perf_counter", lambda: next(clock))
    x = model.logits_processor(model.decoder(model.encoder(torch.zeros(1))))
    assert x is not None
    # Six readings in the decoder, two of them around each kv_proj; two in the logits processor.
    assert timer.take() == (5 - 2) + 1
    assert timer.take() == 0
    assert encoder_decoder.DecoderTimer(torch.nn.Linear(2, 2)).take() == 0


def test_key_biases_are_zeroed_before_weights_are_loaded():
    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(4, 12)}),
            "fc1": torch.nn.Linear(4, 4),
        }
    )
    before = model["fc1"].bias.clone()
    encoder_decoder._before_weights_load(model)
    assert not model["a"]["qkv_proj"].bias.any() and model["fc1"].bias.equal(before)


def prebuilt(encoder_decoder: bool) -> Any:
    """A decode server's batch of a request with audio and one without, as SGLang makes it."""
    audio = SimpleNamespace(num_image_tokens=5)
    return SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=encoder_decoder),
        reqs=[SimpleNamespace(multimodal_inputs=audio), SimpleNamespace(multimodal_inputs=None)],
        device="cpu",
        seq_lens=torch.tensor([9, 3]),
        seq_lens_cpu=torch.tensor([9, 3]),
        orig_seq_lens=torch.tensor([9, 3], dtype=torch.int32),
        seq_lens_sum=12,
    )


def test_encoder_tokens_that_came_from_a_prefill_server_are_parted():
    batch = prebuilt(encoder_decoder=True)
    encoder_decoder._take_encoder_lens(None, batch)
    assert batch.encoder_lens.tolist() == batch.encoder_lens_cpu == [5, 0]
    assert batch.encoder_cached == [True, True]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [4, 3]
    assert batch.orig_seq_lens.tolist() == [4, 3]
    assert batch.orig_seq_lens.dtype == torch.int32
    assert batch.seq_lens_sum == 7
    assert encoder_decoder.decoder_starts(batch).tolist() == [9, 3]


def test_decoder_only_models_are_left_as_they_are():
    batch = prebuilt(encoder_decoder=False)
    encoder_decoder._take_encoder_lens(None, batch)
    assert batch.seq_lens.tolist() == [9, 3] and not hasattr(batch, "encoder_lens")
