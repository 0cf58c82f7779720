"""Small stand-ins for tests of SpecASR: random Whispers, byte vocabularies, scripted models."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from speech.specasr.cache import DraftCache
from speech.specasr.draft_model import Feed, Prediction
from speech.specasr.vocabulary import Vocabulary, byte_of_char

SPECIALS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|fr|>", "<|translate|>"]
SPECIALS += ["<|transcribe|>", "<|startofprev|>", "<|notimestamps|>", "<|0.00|>", "<|0.02|>"]
MEL_BINS, FRAMES, POSITIONS = 8, 40, 300


def vocab(joined: Sequence[str] = ()) -> dict[str, int]:
    """256 bytes, then `joined`, in GPT-2's characters; a merge's parts must come before it."""
    char_of = {byte: char for char, byte in byte_of_char().items()}
    texts = [bytes([i]) for i in range(256)] + [text.encode() for text in joined]
    return {"".join(char_of[byte] for byte in text): i for i, text in enumerate(texts)}


def vocabulary(joined: Sequence[str] = (), multilingual: bool = True) -> Vocabulary:
    """A vocabulary of bytes and `joined` texts, specials behind them."""
    tokens = vocab(joined)
    made = Vocabulary(tokens, {name: len(tokens) + i for i, name in enumerate(SPECIALS)})
    made.is_multilingual = multilingual
    return made


def write_whisper(folder: Path, joined: Sequence[str] = (), seed: int = 0) -> None:
    """A random Whisper over `vocab(joined)`, with its tokenizer.json."""
    tokens = vocab(joined)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": len(tokens) + i, "content": name, **flags, "special": True}
        for i, name in enumerate(SPECIALS)
    ]
    tokenizer = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": tokens, "merges": []},
    }  # fmt: skip
    random_whisper(len(tokens) + len(SPECIALS), seed).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def random_whisper(vocab_size: int, seed: int = 0) -> WhisperForConditionalGeneration:
    """transformers' Whisper with random weights, biases and norms included."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=vocab_size, d_model=16, encoder_layers=2, decoder_layers=3,
        num_mel_bins=MEL_BINS, encoder_attention_heads=2, decoder_attention_heads=4,
        encoder_ffn_dim=24, decoder_ffn_dim=32, max_source_positions=FRAMES // 2,
        max_target_positions=POSITIONS, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return model


class ScriptedModel:
    """A draft model whose predictions are a function of the tokens up to a place.

    The tokens are read from the cache as attention would see them, so that a wrong tree mask gives
    wrong predictions.
    """

    max_positions = POSITIONS

    def __init__(self, predict: Callable[[tuple[int, ...]], Prediction]) -> None:
        self._predict = predict
        self.passes: list[int] = []

    def encode(self, features: torch.Tensor) -> DraftCache:
        return DraftCache(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))

    def step(self, caches: Sequence[DraftCache], feeds: Sequence[Feed]) -> list[list[Prediction]]:
        answers = []
        for cache, feed in zip(caches, feeds, strict=True):
            first = len(cache)
            cache.append(feed.tokens, feed.parents)
            slots = range(first, len(cache))
            seen = [[t for t, v in zip(cache.tokens, cache.visible[s], strict=False) if v]
                    for s in slots]  # fmt: skip
            assert [len(path) - 1 for path in seen] == [cache.depths[s] for s in slots]
            answers.append([self._predict(tuple(path)) for path in seen])
        self.passes.append(sum(len(feed.tokens) for feed in feeds))
        return answers
