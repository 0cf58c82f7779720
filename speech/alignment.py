"""When each word was said: Whisper's cross-attention, aligned by openai-whisper (timing.py)."""

import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from whisper.model import ModelDimensions, Whisper
from whisper.timing import find_alignment, merge_punctuations

from speech.audio import log_mels
from speech.chunks import Chunk
from speech.prompts import WhisperVocabulary
from speech.segments import Word

_HOP_SAMPLES = 160
# Pairs of openai-whisper's transcribe().
_PREPENDED = "\"'“¿([{-"
_APPENDED = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001

# transformers' names -> openai-whisper's; the order matters.
_RENAMES = (
    (r"^model\.", ""),
    (r"\.layers\.", ".blocks."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"^decoder\.embed_tokens\.", "decoder.token_embedding."),
    (r"\.embed_positions\.weight$", ".positional_embedding"),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
)


class Aligner:
    """Finds the times of words; safe to use from several threads, one at a time works.

    Args:
        folder: a Hugging Face Whisper (config.json, *.safetensors).
    """

    def __init__(self, folder: Path):
        self._folder = folder
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._vocabulary = WhisperVocabulary(config["vocab_size"])
        self._model: Whisper | None = None
        self._lock = threading.Lock()

    def speaks(self, language: str) -> bool:
        """Whether its model knows the language (ISO code)."""
        return language in self._vocabulary.languages

    def words(self, chunk: Chunk, text: str, language: str, task: str) -> list[Word]:
        """The words of a chunk's text with their times in the whole audio.

        Args:
            text: what is said in the chunk.
            language: ISO code.
            task: "transcribe" or "translate".
        """
        tokenizer = self._vocabulary.for_language(language, task)
        tokens = tokenizer.encode(" " + text.strip(), disallowed_special=())
        tokens = tokens[: 448 - len(tokenizer.sot_sequence) - 2]
        if not text.strip():
            return []
        with self._lock, torch.inference_mode():
            model = self._model = self._model or load_whisper(self._folder)
            mel = log_mels(chunk.samples, model.dims.n_mels)
            frames = max(2, len(chunk.samples) // _HOP_SAMPLES)
            alignment = find_alignment(model, tokenizer, tokens, mel, frames)
        merge_punctuations(alignment, _PREPENDED, _APPENDED)
        timings = [timing for timing in alignment if timing.word.strip()]
        limit = _longest([timing.end - timing.start for timing in timings])
        return [
            _word(chunk, t.word.strip(), float(t.start), float(min(t.end, t.start + limit)))
            for t in timings
        ]


def load_whisper(folder: Path) -> Whisper:
    """A Hugging Face Whisper as openai-whisper's model, in fp32 on the CPU.

    Raises:
        ValueError: weights are missing or unknown.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Whisper(
        ModelDimensions(
            n_mels=config["num_mel_bins"],
            n_audio_ctx=config["max_source_positions"],
            n_audio_state=config["d_model"],
            n_audio_head=config["encoder_attention_heads"],
            n_audio_layer=config["encoder_layers"],
            n_vocab=config["vocab_size"],
            n_text_ctx=config["max_target_positions"],
            n_text_state=config["d_model"],
            n_text_head=config["decoder_attention_heads"],
            n_text_layer=config["decoder_layers"],
        )
    )
    paths = sorted(folder.glob("*.safetensors"))
    weights = dict(itertools.chain.from_iterable(_weights(path) for path in paths))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"{folder} is no Whisper that openai-whisper could load: {error}"
        ) from None
    _set_alignment_heads(model, folder)
    return model.eval()


def _weights(path: Path) -> Any:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name != "proj_out.weight":
                yield renamed(name), file.get_tensor(name).float()


def renamed(name: str) -> str:
    """openai-whisper's name of a weight that transformers calls `name`."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _set_alignment_heads(model: Whisper, folder: Path) -> None:
    """The heads that the generation config names; else openai-whisper's, the upper layers' all."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    heads = json.loads(path.read_text(encoding="utf-8")).get("alignment_heads")
    if heads:
        mask = torch.zeros(model.dims.n_text_layer, model.dims.n_text_head, dtype=torch.bool)
        for layer, head in heads:
            mask[layer, head] = True
        model.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)


def _longest(durations: list[float]) -> float:
    """How long a word may last: attention tends to stretch one over a pause (timing.py's rule)."""
    lasting = [duration for duration in durations if duration > 0]
    return max(0.5, 2 * min(0.7, float(np.median(lasting)))) if lasting else 1.0


def _word(chunk: Chunk, word: str, start: float, end: float) -> Word:
    # Attention lets words run into the silences around them; the VAD knows where those are.
    for first, last in chunk.speech:
        if start < first < end:
            start = first
        if start < last < end:
            end = last
            break
    at = chunk.source_time(start)
    return Word(word, round(at, 2), round(max(at, chunk.source_time(end, end=True)), 2))
