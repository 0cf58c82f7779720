"""Toy targets for tests of the block drafter: outputs that a tiny model learns in seconds."""

from pathlib import Path

import numpy as np

from sglang_ext.block_drafter.drafter_manifest import Manifest, SourceRule
from sglang_ext.block_drafter.kept_tokens import KeptTokens
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.recipes import Recipe
from sglang_ext.block_drafter.shapes import Shape
from sglang_ext.block_drafter.trainer import Trainer
from sglang_ext.block_drafter.training_data import Example, TrainingData, source_rule
from sglang_ext.block_drafter.training_set import TrainingSet, make_training_set

VOCAB, END, TEMPLATE = 48, 2, (5, 6, 7)
FIRST, SPAN = 10, 16
SHAPE = Shape(32, 2, 64, 1, 1, block=6, window=4, source_tokens=16)
RECIPE = Recipe(
    steps=200,
    batch=16,
    prefixes=8,
    learning_rate=3e-3,
    warmup=20,
    dropout=0.0,
    average=2,
    evaluate=40,
    patience=9,
)


def repeating(examples: int = 300, namespace: str = "default") -> TrainingData:
    """A target that writes the first token of its source 12 times, and ends."""
    data = TrainingData("repeating")
    for n in range(examples):
        source = [FIRST + n % SPAN, FIRST + n // SPAN % SPAN]
        output = np.repeat(source[0], 12)
        prompt = [*TEMPLATE[:2], *source, TEMPLATE[2]]
        data.add(
            Example(
                np.array(prompt, dtype=np.int32),
                np.append(output, END).astype(np.int32),
                namespace=namespace,
            ),
            1 << 30,
        )
    return data


def training_set(data: TrainingData) -> tuple[TrainingSet, SourceRule]:
    rule = source_rule(data, SHAPE.source_tokens)
    return make_training_set(data, rule, (END,), VOCAB, VOCAB, VOCAB), rule


def manifest(data: TrainingData, rule: SourceRule, outputs: int, **changes) -> Manifest:
    stated = {
        "target": "repeater",
        "tokenizer": "0123456789abcdef",
        "vocab_size": VOCAB,
        "ends": (END,),
        "shape": SHAPE,
        "source": rule,
        "outputs": outputs,
        "weights": "0" * 64,
        "data": {**data.summary(), "digest": data.digest()},
    }
    return Manifest(**{**stated, **changes})


def trainer(folder: Path, data: TrainingData, recipe: Recipe = RECIPE, **given) -> Trainer:
    made, rule = training_set(data)
    return Trainer(folder, made, manifest(data, rule, made.kept.outputs), recipe, "cpu", **given)


def untrained(shape: Shape = SHAPE, vocab: int = VOCAB) -> tuple[BlockModel, KeptTokens]:
    kept = KeptTokens(np.arange(vocab), vocab, vocab)
    return BlockModel(shape, kept.num_rows, kept.num_classes), kept
