"""A model's folder with a real tokenizer, trained in milliseconds, and `datastore` on it."""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_ext.commands.datastore import add_commands

VOCAB_SIZE = 600
TEXTS = [f"Text number {i}: what is {i} times {i + 1}? It is {i * (i + 1)}.\n" for i in range(400)]


def make_model(folder: Path, size: int = 500) -> str:
    """A model folder without a model: tokenizer.json and config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(16)  # as some models' files have it; corpora must not be cut
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(*argv: object) -> int:
    """`sglang-ext datastore ARGV`; returns the exit code."""
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(["datastore", *map(str, argv)])
    return args.func(args)
