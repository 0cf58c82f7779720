"""What SGLang's tokenizer manager does with a Whisper request's audio, corrected.

Replaces sglang/srt/multimodal/processors/whisper.py, which prompts English-only models with
language and task tokens that they do not have, defaults unnoticed to English, ignores prompt
tokens that come with the request, and decodes and computes features on the event loop.
"""

import asyncio
import base64
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import numpy as np

from sglang_ext import sglang_points
from sglang_ext.sglang_points.hooking import hook
from sglang_ext.whisper import audio_context

if TYPE_CHECKING:
    from speech.prompts import WhisperVocabulary

ARCHITECTURE = "WhisperForConditionalGeneration"


@dataclass(frozen=True)
class PcmAudio:
    """Decoded audio as `GenerateReqInput.audio_data`.

    Attributes:
        samples: float32[n] at 16 kHz, mono; Whisper reads the first 30 s.
    """

    samples: np.ndarray


def register() -> None:
    """Have SGLang make our processor for Whisper models; in every process, before models load."""
    hook(sglang_points.PROCESSOR_CLASS, _processor_class)


def _processor_class(original: Any, hf_config: Any, *args: Any, **kwargs: Any) -> Any:
    if ARCHITECTURE in (getattr(hf_config, "architectures", None) or ()):
        return _whisper_processor()
    return original(hf_config, *args, **kwargs)


def _whisper_processor() -> type:
    """The class, made late: SGLang's modules load after its plugins."""
    from sglang.srt.managers.schedule_batch import (
        Modality,
        MultimodalDataItem,
        MultimodalProcessorOutput,
    )
    from sglang.srt.models.whisper import WhisperForConditionalGeneration
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    from sglang_ext.options import Options
    from speech.prompts import WhisperVocabulary

    class WhisperAudioProcessor(BaseMultimodalProcessor):
        """Audio -> log-mel features and the decoder's prompt.

        A request brings its own prompt in input_ids; without one, sampling_params' language
        (default English) and timestamp_granularities make it, as SGLang's processor reads them.
        """

        models = (WhisperForConditionalGeneration,)

        def __init__(self, hf_config: Any, *args: Any, **kwargs: Any):
            super().__init__(hf_config, *args, **kwargs)
            self._vocabulary = WhisperVocabulary(hf_config.vocab_size)
            self._draft_mels = draft_mels(Options.from_env().draft_model, hf_config.num_mel_bins)

        async def process_mm_data_async(
            self, image_data: Any, audio_data: Any, input_text: Any, request_obj: Any, **_: Any
        ) -> Any:
            if not audio_data:
                return None
            if len(audio_data) != 1:
                raise ValueError(f"Whisper takes one audio a request, got {len(audio_data)}")
            asked = audio_context.asked(request_obj.sampling_params)
            prompt = take_prompt(request_obj, self._vocabulary, self.hf_config.vocab_size)
            feature, extra = await _made_off_the_loop(
                audio_data[0], self.io_executor, self._features
            )
            feature, extra = audio_context.cut(feature, extra, asked)
            item = MultimodalDataItem(
                feature=feature, modality=Modality.AUDIO, model_specific_data=extra
            )
            return MultimodalProcessorOutput(input_ids=prompt, mm_items=[item])

        def _features(self, samples: np.ndarray) -> tuple[Any, dict[str, Any]]:
            return features(samples, self._processor.feature_extractor, self._draft_mels)

    return WhisperAudioProcessor


async def _made_off_the_loop(
    audio: Any, io_threads: Executor, make: Callable[[np.ndarray], Any]
) -> Any:
    """What `make` gives for a request's first 30 s, with the event loop free meanwhile."""
    from sglang_ext.whisper import audio_decoders

    loop = asyncio.get_running_loop()
    # Two kinds of threads: a slow download must not keep others from decoding.
    source = await loop.run_in_executor(io_threads, opened, audio)
    samples = await loop.run_in_executor(audio_decoders.threads(), first_window, source)
    return await loop.run_in_executor(io_threads, make, samples)


def features(
    samples: np.ndarray, extractor: Any, draft_mels: int | None
) -> tuple[Any, dict[str, Any]]:
    """What a Whisper target reads of audio, and beside it what its draft model reads.

    Args:
        samples: float32[n] at 16 kHz, up to 30 s.
        extractor: the target's WhisperFeatureExtractor.
        draft_mels: mel bins of the draft model; None: it reads the target's features.

    Returns:
        float32[mels, 3000], and `draft_features` alike where there are any.
    """
    from speech.audio import SAMPLE_RATE, log_mels

    made = extractor(samples, sampling_rate=SAMPLE_RATE, padding="max_length", return_tensors="pt")[
        "input_features"
    ][0]
    return made, {"draft_features": log_mels(samples, draft_mels)} if draft_mels else {}


def draft_mels(draft_model: str, target_mels: int) -> int | None:
    """The draft model's mel bins where it needs features of its own, else None."""
    if not draft_model:
        return None
    config = json.loads((Path(draft_model) / "config.json").read_text(encoding="utf-8"))
    mels = config.get("num_mel_bins", target_mels)
    return mels if mels != target_mels else None


def take_prompt(request: Any, vocabulary: "WhisperVocabulary", vocab_size: int) -> list[int]:
    """A request's decoder prompt; what makes it is taken out of its sampling_params.

    Args:
        request: SGLang's GenerateReqInput, of one prompt.

    Raises:
        ValueError: input_ids, language or timestamp_granularities are not what Whisper knows.
    """
    # A copy: the prompts of a batch have one dict together. What is left reaches SamplingParams,
    # which does not know these.
    params = request.sampling_params = dict(request.sampling_params or {})
    code = _language(params.pop("language", None), vocabulary)
    timestamps = _granularities(params.pop("timestamp_granularities", None))
    detect = params.pop("_detect_language", None)
    if request.input_ids:
        return checked_prompt(request.input_ids, vocab_size)
    if detect:  # SGLang's own route constrains the following tokens by a grammar
        return [vocabulary.start]
    return vocabulary.prompt(code, timestamps=bool(timestamps))


def _language(given: Any, vocabulary: "WhisperVocabulary") -> str:
    if not isinstance(given, str | None):
        raise ValueError(f"language must be text, got {str(given)[:40]!r}")
    return vocabulary.language_code(given or "en")


def _granularities(given: Any) -> list[str]:
    from speech.prompts import GRANULARITIES

    if given is None:
        return []
    if not isinstance(given, list) or any(g not in GRANULARITIES for g in given):
        raise ValueError(
            f"timestamp_granularities must be a list of {' and '.join(GRANULARITIES)}, got "
            f"{str(given)[:40]!r}"
        )
    return given


def checked_prompt(ids: Sequence[Any], vocab_size: int) -> list[int]:
    """The prompt that a request brings.

    Raises:
        ValueError: an id is not of the vocabulary; the embedding would end the scheduler.
    """
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
    if wrong:
        raise ValueError(
            f"input_ids must be whole numbers from 0 to {vocab_size - 1}, got {str(wrong[0])[:40]}"
        )
    return list(ids)


def opened(audio: Any) -> PcmAudio | BytesIO | Path:
    """What a request may bring as audio: samples, bytes, an address, a data URL or a path, by
    SGLang's rules (srt/utils/common.py:load_audio).

    Raises:
        ValueError: it is none of these, or cannot be had.
    """
    if isinstance(audio, PcmAudio):
        return audio
    if isinstance(audio, bytes):
        return BytesIO(audio)
    if not isinstance(audio, str) or not audio:
        raise ValueError(f"audio_data must be an address, a data URL or a path, got {type(audio)}")
    if audio.startswith("data:"):
        return BytesIO(base64.b64decode(audio.partition(",")[2], validate=True))
    if audio.startswith(("http://", "https://")):
        from sglang.srt.utils.common import download_remote_media

        timeout = int(os.getenv("REQUEST_TIMEOUT", "5"))
        try:
            return BytesIO(download_remote_media(audio, timeout=timeout))
        except OSError as error:
            raise ValueError(f"the audio cannot be fetched: {error}") from None
    return Path(unquote(urlparse(audio).path) if audio.startswith("file://") else audio)


def first_window(source: PcmAudio | BytesIO | Path) -> np.ndarray:
    """Its first 30 s: float32[n] at 16 kHz.

    Raises:
        ValueError: it cannot be opened or decoded.
        fastapi.HTTPException: 503, too much audio waits to be decoded.
    """
    from fastapi import HTTPException

    from sglang_ext.whisper import audio_decoders
    from speech.audio import WINDOW_SAMPLES
    from speech.audio_errors import DecodersBusy

    if isinstance(source, PcmAudio):
        return source.samples[:WINDOW_SAMPLES]
    try:
        decoded = audio_decoders.pool().open(source)
    except OSError as error:
        raise ValueError(f"the audio cannot be opened: {error}") from None
    with decoded:
        try:
            return decoded.first(WINDOW_SAMPLES)
        except DecodersBusy as error:
            raise HTTPException(503, str(error)) from None
