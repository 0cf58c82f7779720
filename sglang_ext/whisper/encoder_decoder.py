"""What encoder-decoder targets (Whisper) need in a decode step under speculation.

SGLang 0.5.23 keeps a request's encoder tokens at the front of its row of req_to_token, while
`seq_lens` counts decoder tokens alone (ScheduleBatch.prepare_encoder_info_extend). Its
speculative workers know nothing of that; ours asks here.
"""

import time
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


# The attribute of modules that says so to what packs their weights (cpu/linear.py), by its name.
_MARK = "_runs_at_prefill_only"
_ENCODER = "encoder."


def decoder_starts(batch: "ScheduleBatch") -> torch.Tensor:
    """int64[bs], the columns of req_to_token from which each request's next tokens are stored."""
    if batch.encoder_lens is None:
        return batch.seq_lens
    return batch.seq_lens + batch.encoder_lens


def keep_encoder_outputs(batch: "ScheduleBatch") -> None:
    """Have the forward pass read the encoder's KV from the cache and not run the encoder again."""
    if batch.encoder_lens is not None:
        batch.encoder_cached = [True] * len(batch.reqs)


def audio_features(req: "Req") -> torch.Tensor | None:
    """float32[mels, frames], the log-mel features for a drafter; None for a request of text.

    Those made for the draft model (audio_processor.py), else the target's own.
    """
    items = getattr(getattr(req, "multimodal_inputs", None), "mm_items", None)
    if not items:
        return None
    extra = getattr(items[0], "model_specific_data", None) or {}
    features = extra.get("draft_features", items[0].feature)
    if not isinstance(features, torch.Tensor):
        return None
    return features.reshape(features.shape[-2:]).to("cpu", torch.float32)


class DecoderTimer:
    """Times an encoder-decoder model's decoder, without the K and V that it makes of the audio.

    That is what draft tokens behind a prompt add to; the rest of a prefill takes many times as long
    and hides it.

    Args:
        model: SGLang's model; without a `decoder`, nothing is timed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._seconds = 0.0
        self._starts: list[float] = []
        decoder = getattr(model, "decoder", None)
        if not isinstance(decoder, torch.nn.Module):
            return
        self._time(decoder, 1)
        self._time(model.logits_processor, 1)
        for name, module in decoder.named_modules():
            if name.endswith(".encoder_attn.kv_proj"):
                self._time(module, -1)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        self._starts.clear()
        return seconds

    def _time(self, module: torch.nn.Module, sign: int) -> None:
        def start(*_: Any) -> None:
            self._starts.append(time.perf_counter())

        def end(*_: Any) -> None:
            self._seconds += sign * (time.perf_counter() - self._starts.pop())

        module.register_forward_pre_hook(start)
        module.register_forward_hook(end)


def runs_at_prefill_only(name: str) -> bool:
    """Whether the module `name` of SGLang's Whisper has no part in a decode step."""
    return name.startswith(_ENCODER) or name.endswith(".encoder_attn.kv_proj")


def is_prefill_only(module: Any) -> bool:
    """Whether `runs_at_prefill_only` is true of a module of a model whose weights are loaded."""
    return hasattr(module, _MARK)


def is_in_encoder(module: Any) -> bool:
    """Whether a module of a model whose weights are loaded is a part of its encoder."""
    return getattr(module, _MARK, "").startswith(_ENCODER)


def register() -> None:
    """Mend what SGLang lacks for Whisper; once in every process, before models load.

    SGLang's fused q/k/v projection has a bias for the keys too and leaves it as allocated, except
    in the decoder's cross-attention: whatever stood in that memory would be added.
    """
    hook(sglang_points.LOAD_WHISPER, _before_weights_load)
    hook(sglang_points.PREBUILT, _take_encoder_lens)


def _take_encoder_lens(_result: None, batch: "ScheduleBatch") -> None:
    """Part encoder tokens from decoder tokens where another server has read the prompts.

    As prepare_encoder_info_extend does behind a prefill; SGLang 0.5.23 does not for disaggregation,
    and its decode server stops at the first request of an encoder-decoder model. What came over is
    whole: the encoder's tokens stand first in the prompt, and so does their KV in the pool's row.
    """
    if not batch.model_config.is_encoder_decoder:
        return
    inputs = [req.multimodal_inputs for req in batch.reqs]
    lens = [0 if i is None else i.num_image_tokens or 0 for i in inputs]
    batch.encoder_lens_cpu = lens
    batch.encoder_lens = torch.tensor(lens, dtype=torch.int64, device=batch.device)
    batch.encoder_cached = [True] * len(lens)
    batch.encoder_out_cache_loc = torch.zeros(0, dtype=torch.int64, device=batch.device)
    batch.seq_lens = batch.seq_lens - batch.encoder_lens
    batch.seq_lens_cpu = batch.seq_lens_cpu - torch.tensor(lens)
    batch.orig_seq_lens = batch.orig_seq_lens - batch.encoder_lens.to(torch.int32)
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


def _before_weights_load(model: Any, *_args: Any, **_kwargs: Any) -> None:
    _zero_key_biases(model)
    for name, module in model.named_modules():
        if runs_at_prefill_only(name):
            setattr(module, _MARK, name)


def _zero_key_biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith((".qkv_proj.bias", ".kv_proj.bias")):
            parameter.data.zero_()
