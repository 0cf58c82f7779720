"""Word error rates, and what a Whisper transcribes on its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jiwer
from whisper.normalizers import EnglishTextNormalizer  # type: ignore[import-untyped]

from scripts.lib.speech_client import SAMPLE_RATE
from scripts.speech_data import Clip


@dataclass(frozen=True)
class WordErrors:
    """Word error rates after Whisper's English normalizer (Whisper paper, section 4.4)."""

    references: Sequence[str]

    def rate(self, texts: Iterable[str]) -> float:
        """Word error rate over all texts together, 0.07 for 7%."""
        normalize: Callable[[str], str] = EnglishTextNormalizer()
        return jiwer.wer(
            [normalize(text) for text in self.references], [normalize(text) for text in texts]
        )


def draft_texts(folder: str, clips: Sequence[Clip]) -> list[str]:
    """What the draft model alone transcribes, greedily, through transformers."""
    import torch
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    processor = AutoProcessor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    wanted = (
        {"language": "en", "task": "transcribe"} if model.generation_config.is_multilingual else {}
    )
    texts = []
    for clip in clips:
        features = processor.feature_extractor(
            clip.mono(SAMPLE_RATE), sampling_rate=SAMPLE_RATE, return_tensors="pt"
        ).input_features
        with torch.no_grad():
            tokens = model.generate(features, do_sample=False, num_beams=1, **wanted)
        texts.append(processor.tokenizer.decode(tokens[0], skip_special_tokens=True))
    return texts
