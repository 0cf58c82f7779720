"""Parts of Whisper's window: what is cut, where its KV goes, and batches of several lengths."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.request_options import RequestOptionError
from sglang_ext.whisper import audio_context


@pytest.mark.parametrize(
    ("params", "frames"),
    [
        (None, None),
        ({}, None),
        ({"custom_params": "x"}, None),
        ({"custom_params": {"audio_ctx": 300}}, 300),
        ({"custom_params": {"sglang_ext": {"audio_ctx": 300}}}, 300),
    ],
)
def test_a_request_says_how_many_frames_are_encoded(params, frames):
    assert audio_context.asked(params) == frames


@pytest.mark.parametrize("value", [0, 1501, -1, 2.5, "300", True])
def test_other_numbers_are_refused_by_name(value):
    message = "custom_params.audio_ctx must be a whole number of 1 to 1500"
    with pytest.raises(RequestOptionError, match=message):
        audio_context.asked({"custom_params": {"audio_ctx": value}})


def test_the_target_and_its_draft_model_hear_the_same():
    feature, drafts = torch.rand(80, 3000), torch.rand(128, 3000)
    cut, extra = audio_context.cut(feature, {"draft_features": drafts}, 200)
    assert cut.equal(feature[:, :400]) and cut.untyped_storage().nbytes() == 4 * cut.numel()
    assert extra["draft_features"].equal(drafts[:, :400]) and extra["audio_ctx"] == 200
    for whole in (None, 1500):
        cut, extra = audio_context.cut(feature, {"draft_features": drafts}, whole)
        assert cut is feature and extra == {"draft_features": drafts}


def test_each_frame_has_a_place_in_the_pool():
    def original(model, input_ids, mm_inputs):
        return "whole"

    inputs = SimpleNamespace(mm_items=[SimpleNamespace(model_specific_data={"audio_ctx": 3})])
    padded = audio_context._with_encoder_tokens(original, None, array("q", [7, 8]), inputs)
    assert padded == array("q", [0, 0, 0, 7, 8]) and inputs.num_image_tokens == 3
    for known in ({}, None):
        inputs = SimpleNamespace(mm_items=[SimpleNamespace(model_specific_data=known)])
        assert audio_context._with_encoder_tokens(original, None, array("q"), inputs) == "whole"


class Encoder(torch.nn.Module):
    """States that tell where they are from: the sum of a frame's features, and its place."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv1d(4, 4, 3)
        self.passes = []

    def forward(self, features, places, forward_batch):
        self.passes.append(features.shape)
        assert forward_batch == "batch"
        sums = features.unflatten(-1, (-1, 2)).sum((1, 3))
        return torch.stack([sums, places.expand_as(sums)], dim=-1)


def test_requests_of_one_length_are_encoded_together_and_all_stay_in_order():
    features = [torch.rand(4, length) for length in (6, 8, 6, 2)]
    encoder = Encoder()
    made = audio_context.encoded(encoder, features, "batch")
    assert encoder.passes == [(2, 4, 6), (1, 4, 8), (1, 4, 2)]
    alone = [audio_context.encoded(encoder, [part], "batch") for part in features]
    assert made.shape == (3 + 4 + 3 + 1, 2) and made.equal(torch.cat(alone))


class Model:
    """What SGLang's Whisper calls."""

    def __init__(self):
        self.encoder, self.proj_out = Encoder(), "head"

    def decoder(self, input_ids, states, batch, positions):
        self.states = states
        return "hidden"

    def logits_processor(self, **given):
        return given


def batch_of(*lengths, cached=(), decodes=False):
    items = [SimpleNamespace(mm_items=[SimpleNamespace(feature=torch.rand(4, n))]) for n in lengths]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: decodes),
        mm_inputs=[*items, None],
        encoder_cached=[place in cached for place in range(len(lengths))] + [False],
    )


def test_only_a_prefill_of_several_lengths_is_ours(monkeypatch):
    def original(*_args, **_more):
        return "SGLang's"

    monkeypatch.setattr(audio_context, "encoded", lambda *_: torch.ones(7, 2))
    model = Model()
    for batch in (
        batch_of(6, 6),
        batch_of(6),
        batch_of(),
        batch_of(6, 8, cached=[1]),
        batch_of(6, 8, decodes=True),
    ):
        assert audio_context._forward(original, model, "ids", "places", batch) == "SGLang's"
    batch = batch_of(6, 8)
    assert audio_context._forward(original, model, "ids", "places", batch) == {
        "input_ids": "ids", "lm_head": "head", "hidden_states": "hidden", "logits_metadata": batch,
    }  # fmt: skip
    assert model.states.equal(torch.ones(7, 2))
