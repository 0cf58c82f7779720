"""Training batches of the block drafter, and their loss: random prefixes and glancing.

Sources: SpecDec (arXiv 2203.16487, section 3.2: the loss of the next k tokens behind a random
prefix), GLAT (Qian et al., ACL 2021: a first pass decides how many gold tokens are shown).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from sglang_ext.block_drafter.block_predictor import Source, padded, windows
from sglang_ext.block_drafter.kept_tokens import PADDING, UNKNOWN
from sglang_ext.block_drafter.nat_model import BlockModel
from sglang_ext.block_drafter.shapes import Shape

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Blocks to be predicted.

    Attributes:
        sources: int64[n, s] rows, or float32[n, s, width] states of the target.
        padding: bool[n, s], where a source has ended.
        tokens: int64[b, window + block] rows, the decoder's inputs with masks alone; b / n blocks
            of each source, one behind the other.
        gold: int64[b, block] rows, what is to be predicted; PADDING behind an output's end.
        committed: int64[b], tokens before each block.
    """

    sources: torch.Tensor
    padding: torch.Tensor
    tokens: torch.Tensor
    gold: torch.Tensor
    committed: torch.Tensor

    def to(self, device: str) -> "Batch":
        """The batch on a device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def make_batch(
    sources: Sequence[Source],
    outputs: Sequence[Rows],
    shape: Shape,
    prefixes: int,
    rng: np.random.Generator,
) -> Batch:
    """`prefixes` blocks of each output, each behind a prefix of random length, 0 included."""
    of_source = np.repeat(np.arange(len(sources)), prefixes)
    committed = np.array([int(rng.integers(len(outputs[i]))) for i in of_source])
    gold = np.full((len(of_source), shape.block), PADDING, dtype=np.int64)
    last = []
    for row, i, done in zip(gold, of_source, committed, strict=True):
        following = outputs[i][done : done + shape.block]
        row[: len(following)] = following
        last.append(outputs[i][max(0, done - shape.window) : done])
    tokens = windows(last, shape.window, shape.block)
    joined = padded_states(sources) if sources[0].ndim == 2 else padded(sources)
    lengths = np.array([[len(source)] for source in sources])
    ended = np.arange(joined.shape[1]) >= lengths
    arrays = (joined, ended, tokens, gold, committed)
    return Batch(*(torch.from_numpy(array) for array in arrays))


def padded_states(sources: Sequence[Source]) -> npt.NDArray[np.float32]:
    """float32[n, longest, width], zeros behind each source's states."""
    longest = max(map(len, sources))
    joined = np.zeros((len(sources), longest, sources[0].shape[1]), dtype=np.float32)
    for row, states in zip(joined, sources, strict=True):
        row[: len(states)] = states
    return joined


def glancing_loss(
    model: BlockModel, batch: Batch, ratio: float, smoothing: float, generator: torch.Generator
) -> torch.Tensor:
    """The mean loss of the gold tokens that are not shown, a scalar.

    Args:
        ratio: of the tokens that a first pass gets wrong, so many as part of them are shown.
        smoothing: of labels.
        generator: chooses which ones, on the host.
    """
    memory, padding = model.encode(batch.sources), batch.padding
    tokens, hidden = batch.tokens, batch.gold != PADDING
    if ratio > 0:
        guessed = torch.full_like(batch.gold, PADDING)
        model.eval()  # what it would draft, and quicker
        with torch.no_grad():
            logits = model.decode(memory, padding, tokens, batch.committed, hidden)
        model.train()
        guessed[hidden] = logits.max(-1).indices + UNKNOWN  # argmax of bfloat16 is slow
        shown = _shown(guessed, batch.gold, hidden, ratio, generator)
        window = model.shape.window
        block = torch.where(shown, batch.gold, tokens[:, window:])
        tokens = torch.cat([tokens[:, :window], block], dim=1)
        hidden = hidden & ~shown
    logits = model.decode(memory, padding, tokens, batch.committed, hidden)
    labels = batch.gold[hidden] - UNKNOWN
    return cross_entropy(logits.float(), labels, label_smoothing=smoothing)


def _shown(
    guessed: torch.Tensor,
    gold: torch.Tensor,
    present: torch.Tensor,
    ratio: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """bool[b, block], random places of which the gold token is shown; never all of a block's."""
    wrong = ((guessed != gold) & present).sum(1)
    many = torch.minimum((wrong * ratio).floor().long(), present.sum(1) - 1)
    draws = torch.rand(gold.shape, generator=generator).to(gold.device)
    order = draws.masked_fill(~present, 2.0).argsort(1).argsort(1)
    return (order < many[:, None]) & present
