"""Encoding a part of Whisper's window: `custom_params.audio_ctx`, as whisper.cpp calls it.

Whisper pads all audio with silence to 30 s and encodes 1500 frames of it, which costs more than
writing what was said in five seconds. With fewer frames the encoder is as much cheaper, and its
output is another: a few seconds of the silence must be left behind the audio, or Whisper, trained
on whole windows, repeats itself. SGLang 0.5.23 knows whole windows alone (models/whisper.py).
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext import sglang_points
from sglang_ext.request_options import MOST_FRAMES, RequestOptions, flattened
from sglang_ext.sglang_points.hooking import hook

if TYPE_CHECKING:
    import torch

PARAMETER = "audio_ctx"
_MELS_A_FRAME = 2


def register() -> None:
    """Have SGLang's Whisper take windows of any length; in every process, before models load."""
    hook(sglang_points.ENCODER_TOKENS, _with_encoder_tokens)
    hook(sglang_points.ENCODE, _forward)


def asked(sampling_params: Mapping[str, Any] | None) -> int | None:
    """How many frames a request wants encoded; None: all.

    Raises:
        ValueError: it is no such number.
    """
    params = (sampling_params or {}).get("custom_params")
    if not isinstance(params, Mapping):
        return None
    value = (flattened(params) or {}).get(PARAMETER)
    return RequestOptions.parse({PARAMETER: value}, ()).audio_ctx


def cut(feature: Any, extra: Mapping[str, Any], frames: int | None) -> tuple[Any, dict[str, Any]]:
    """What a target, and its draft model, read of audio, cut to what is encoded.

    Args:
        feature: float32[mels, 3000].
        extra: features alike, and what says how many frames there are.
        frames: None: all of them.
    """
    if frames is None or frames >= MOST_FRAMES:
        return feature, dict(extra)
    mels = frames * _MELS_A_FRAME
    shorter = {name: value[:, :mels] for name, value in extra.items()}
    # A copy: a view would be sent with all that it is of.
    return feature[:, :mels].clone(), shorter | {PARAMETER: frames}


def _with_encoder_tokens(
    original: Callable[..., Any], model: Any, input_ids: Any, mm_inputs: Any
) -> Any:
    """SGLang's pad_input_ids, which has a place in the KV pool for each frame."""
    (item, *_) = mm_inputs.mm_items
    frames = (getattr(item, "model_specific_data", None) or {}).get(PARAMETER)
    if frames is None:
        return original(model, input_ids, mm_inputs)
    mm_inputs.num_image_tokens = frames
    return array("q", [0]) * frames + input_ids


def _forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: "torch.Tensor",
    positions: "torch.Tensor",
    forward_batch: Any,
    **more: Any,
) -> Any:
    """SGLang's forward, which joins the features of a batch: they must be of one length."""
    features = _to_encode(forward_batch)
    if len({part.shape[-1] for part in features}) < 2:
        return original(model, input_ids, positions, forward_batch, **more)
    states = encoded(model.encoder, features, forward_batch)
    hidden = model.decoder(input_ids, states, forward_batch, positions)
    return model.logits_processor(
        input_ids=input_ids,
        lm_head=model.proj_out,
        hidden_states=hidden,
        logits_metadata=forward_batch,
    )


def _to_encode(batch: Any) -> "list[torch.Tensor]":
    """The features of a batch's requests whose audio was not encoded yet: [mels, n] each."""
    if batch.forward_mode.is_decode():
        return []
    inputs = zip(batch.mm_inputs or (), batch.encoder_cached or (), strict=False)
    asking = [one for one, cached in inputs if not cached and one is not None and one.mm_items]
    features = [one.mm_items[0].feature for one in asking]
    return [part.reshape(part.shape[-2:]) for part in features]


def encoded(encoder: Any, features: "Sequence[torch.Tensor]", forward_batch: Any) -> "torch.Tensor":
    """The encoder's states of several requests, those of one length in one pass.

    Args:
        features: float[mels, 2 * frames] of each.

    Returns:
        float[all frames, size], in the order of the requests.
    """
    import torch  # commands that read this module's options start without it

    weight = encoder.conv1.weight
    alike: dict[int, list[int]] = defaultdict(list)
    for place, part in enumerate(features):
        alike[part.shape[-1]].append(place)
    states: dict[int, torch.Tensor] = {}
    for length, places in alike.items():
        batch = torch.stack([features[place].to(weight.device, weight.dtype) for place in places])
        frames = torch.arange(length // _MELS_A_FRAME, device=weight.device)
        states |= dict(zip(places, encoder(batch, frames, forward_batch), strict=True))
    return torch.cat([states[place] for place in range(len(features))])
