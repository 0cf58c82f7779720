"""What SGLang's tokenizer manager does with a Whisper request's audio, corrected.

Replaces sglang/srt/multimodal/processors/whisper.py, which prompts English-only models with
language and task tokens that they do not have, defaults unnoticed to English, ignores prompt
tokens that come with the request, and decodes and computes features on the event loop.
"""

import asyncio
import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

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
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.multimodal_processor.get_mm_processor_cls",
        _processor_class,
        HookType.AROUND,
    )


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
    from speech.audio import SAMPLE_RATE, WINDOW_SAMPLES, log_mels
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
            prompt = self._prompt(request_obj)
            loop = asyncio.get_running_loop()
            item = await loop.run_in_executor(self.io_executor, self._item, audio_data[0])
            return MultimodalProcessorOutput(input_ids=prompt, mm_items=[item])

        def _prompt(self, request: Any) -> list[int]:
            params = request.sampling_params or {}
            # Left in place they would reach SamplingParams, which does not know them.
            language = params.pop("language", None)
            timestamps = params.pop("timestamp_granularities", None)
            detect = params.pop("_detect_language", None)
            if request.input_ids:
                return list(request.input_ids)
            if detect:  # SGLang's own route constrains the following tokens by a grammar
                return [self._vocabulary.start]
            code = self._vocabulary.language_code(language or "en")
            return self._vocabulary.prompt(code, timestamps=bool(timestamps))

        def _item(self, audio: Any) -> Any:
            samples = _samples(audio)[:WINDOW_SAMPLES]
            features = self._processor.feature_extractor(
                samples, sampling_rate=SAMPLE_RATE, padding="max_length", return_tensors="pt"
            )["input_features"][0]
            extra = {}
            if self._draft_mels:
                extra["draft_features"] = log_mels(samples, self._draft_mels)
            return MultimodalDataItem(
                feature=features, modality=Modality.AUDIO, model_specific_data=extra
            )

    return WhisperAudioProcessor


def draft_mels(draft_model: str, target_mels: int) -> int | None:
    """The draft model's mel bins where it needs features of its own, else None."""
    if not draft_model:
        return None
    config = json.loads((Path(draft_model) / "config.json").read_text(encoding="utf-8"))
    mels = config.get("num_mel_bins", target_mels)
    return mels if mels != target_mels else None


def _samples(audio: Any) -> np.ndarray:
    """float32[n] at 16 kHz of what a request may bring as audio."""
    if isinstance(audio, PcmAudio):
        return audio.samples
    if isinstance(audio, bytes):
        from speech.audio import decode

        return decode(BytesIO(audio))
    # Addresses, base64 and paths, under SGLang's own rules for them.
    from sglang.srt.utils import load_audio

    return load_audio(audio)
