"""How `sglang-ext drafter train` trains, by what is trained; its defaults are these."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoopRecipe:
    """How to train, whatever is trained.

    Attributes:
        steps: most updates.
        batch: examples in an update.
        learning_rate: the highest, reached after `warmup` steps.
        clip: of the gradient's norm.
        evaluate: steps between evaluations.
        patience: evaluations without a better one after which training ends.
        minutes: most minutes of training, 0 for no limit; those before a kill count.
        checkpoint_s: seconds between states on the disk.
        bf16: products are in bfloat16 (torch.autocast), weights and their updates in float32.
    """

    steps: int
    batch: int
    learning_rate: float
    warmup: int
    clip: float
    evaluate: int
    patience: int = 10
    minutes: float = 0.0
    checkpoint_s: float = 45.0
    seed: int = 1
    bf16: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe(LoopRecipe):
    """How to train a block drafter. Where the paper's differs, it is for 300k steps on GPUs.

    The learning rate falls with 1 / sqrt(step).

    Attributes:
        prefixes: blocks of each example.
        fading: of a place's tokens so many are learned from, as part of those of the place before.
        glancing: of the tokens that a first pass gets wrong, so many are shown at the start, as
            part of them; 0: there is no first pass.
        smoothing, dropout: of labels, of layers.
        average: how many of the last evaluations' weights are averaged.
    """

    steps: int = 20_000
    batch: int = 32
    learning_rate: float = 2e-3
    warmup: int = 400
    clip: float = 5.0
    evaluate: int = 250
    prefixes: int = 8
    fading: float = 0.8
    glancing: float = 0.0
    smoothing: float = 0.1
    dropout: float = 0.1
    average: int = 10


@dataclass(frozen=True, kw_only=True)
class StreamRecipe(LoopRecipe):
    """How to train lookahead streams. The learning rate falls to 0 as a cosine."""

    steps: int = 1000
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 50
    clip: float = 1.0
    evaluate: int = 50
