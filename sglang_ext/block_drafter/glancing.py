"""Training batches of the block drafter, and their loss: random prefixes, and glancing.

Sources: SpecDec (arXiv 2203.16487, section 3.2: the loss of the next k tokens behind a random
prefix), GLAT (Qian et al., ACL 2021: a first pass decides how many gold tokens are shown).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from sglang_ext.block_drafter.block_predictor import Source, block_inputs, last_rows, padded
from sglang_ext.block_drafter.kept_tokens import PADDING, UNKNOWN
from sglang_ext.block_drafter.nat_model import EARLIER, BlockModel
from sglang_ext.block_drafter.shapes import Shape
from sglang_ext.block_drafter.states_on_disk import States

Rows = npt.NDArray[np.int64]

# Lengths and numbers of places are multiples of these: oneDNN compiles a product for each shape
# that it sees, which takes as long as the product.
_LENGTHS, _PLACES = 8, 256
_IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Blocks to be predicted.

    Attributes:
        sources: int64[n, s] rows, or float32[n, s, states.width] of the target.
        written: int64[n, m] rows of outputs without their last token, or the target's states at
            these, float32[n, m, states.width].
        seen: bool[b, s + m], which of both each block may read.
        tokens: int64[b, 1 + block] rows, the decoder's inputs with masks alone; b / n blocks of
            each source, one behind the other.
        gold: int64[b, block] rows, what is to be predicted; PADDING behind an output's end.
        committed: int64[b], tokens before each block.
        before: int64[b], of which entry is the last committed token's predecessor.
        earlier: int64[b, block, EARLIER] rows, the tokens before each place.
    """

    sources: torch.Tensor
    written: torch.Tensor
    seen: torch.Tensor
    tokens: torch.Tensor
    gold: torch.Tensor
    committed: torch.Tensor
    before: torch.Tensor
    earlier: torch.Tensor

    def to(self, device: str) -> "Batch":
        """The batch on a device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def make_batch(
    sources: Sequence[Source],
    outputs: Sequence[Rows],
    shape: Shape,
    prefixes: int,
    rng: np.random.Generator,
    written: Sequence[States] | None = None,
) -> Batch:
    """`prefixes` blocks of each output, behind prefixes of random lengths, as different as can be.

    Args:
        written: the target's states at each output's tokens but the last; a drafter that reads
            them drafts nothing behind prefixes of length 0.
    """
    least = 0 if written is None else 1
    lengths = np.stack([_lengths(least, len(output), prefixes, rng) for output in outputs])
    committed = lengths.reshape(-1)
    gold = np.full((len(committed), shape.block), PADDING, dtype=np.int64)
    last = []
    which = np.repeat(np.arange(len(outputs)), prefixes)
    for row, i, done in zip(gold, which, committed, strict=True):
        following = outputs[i][done : done + shape.block]
        row[: len(following)] = following
        last.append(last_rows(outputs[i][:done]))
    before = [output[:-1] for output in outputs] if written is None else written
    of_sources, of_outputs = padded(sources, _LENGTHS), padded(before, _LENGTHS)
    read = np.array([len(source) for source in sources])
    in_source = np.arange(of_sources.shape[1]) < read[:, None]
    place, end = np.arange(of_outputs.shape[1]), committed[:, None] - 1
    in_output = (place < end) & (place >= end - shape.window)
    seen = np.concatenate([in_source.repeat(prefixes, 0), in_output], axis=1)
    inputs = block_inputs(np.array(last)[:, -1], shape.block)
    predecessor = np.where(committed > 1, of_sources.shape[1] + committed - 2, read[which] - 1)
    earlier = np.lib.stride_tricks.sliding_window_view(
        np.concatenate([last, gold[:, :-1]], axis=1), EARLIER, axis=1
    )
    arrays = (of_sources, of_outputs, seen, inputs, gold, committed, predecessor, earlier.copy())
    return Batch(*(torch.from_numpy(array) for array in arrays))


def _lengths(least: int, tokens: int, count: int, rng: np.random.Generator) -> Rows:
    """int64[count], of prefixes: `least` to one below `tokens`, or `least`."""
    possible = np.arange(least, max(tokens, least + 1))
    return np.resize(rng.permutation(possible), count)


def block_loss(
    model: BlockModel,
    batch: Batch,
    *,
    glancing: float,
    fading: float,
    smoothing: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """The mean loss of the gold tokens that are learned from and not shown, a scalar.

    Args:
        glancing: of the tokens that a first pass gets wrong, so many as part of them are shown.
        fading: of a place's tokens so many are learned from, as part of those of the place before
            it: what lies behind a wrong token is of no use.
        smoothing: of labels.
        generator: chooses which ones, on the host.
    """
    memory = _memory_of(model, batch)
    tokens, hidden = batch.tokens, batch.gold != PADDING
    if glancing > 0:
        shown = _glanced(model, memory, batch, glancing, generator)
        block = torch.where(shown, batch.gold, tokens[:, 1:])
        tokens = torch.cat([tokens[:, :1], block], dim=1)
        hidden = hidden & ~shown
    kept = torch.rand(hidden.shape, generator=generator)
    least = fading ** torch.arange(hidden.shape[1])
    learned = hidden & (kept < least).to(hidden.device)
    wanted = _as_many_as(_PLACES, learned)
    logits = _logits(model, memory, batch, tokens, wanted)
    labels = torch.where(learned, batch.gold - UNKNOWN, _IGNORED)[wanted]
    total = cross_entropy(
        logits.float(), labels, label_smoothing=smoothing, ignore_index=_IGNORED, reduction="sum"
    )
    return total / learned.sum().clamp(min=1)  # outputs of one token leave nothing to learn


def _logits(
    model: BlockModel,
    memory: torch.Tensor,
    batch: Batch,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """float[m, num_classes] of the wanted places, behind the gold tokens."""
    places = model.decode(memory, batch.seen, tokens, batch.committed, batch.before, wanted)
    return model.logits(places, batch.earlier[wanted])


def _memory_of(model: BlockModel, batch: Batch) -> torch.Tensor:
    """float[n, s + m, width], of what was read and what was written."""
    memory = model.encode(batch.sources)
    places = torch.arange(batch.written.shape[1], device=memory.device)
    places = places.expand(batch.written.shape[:2])
    written = model.dropout(model.remembered(batch.written, places, written=True))
    return torch.cat([memory, written.to(memory.dtype)], dim=1)


def _glanced(
    model: BlockModel,
    memory: torch.Tensor,
    batch: Batch,
    ratio: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """bool[b, block], the gold tokens that are shown behind a first pass."""
    hidden = batch.gold != PADDING
    guessed = torch.full_like(batch.gold, PADDING)
    model.eval()  # what it would draft, and quicker
    with torch.no_grad():
        wanted = _as_many_as(_PLACES, hidden)
        logits = _logits(model, memory, batch, batch.tokens, wanted)
    model.train()
    guessed[wanted] = logits.max(-1).indices + UNKNOWN  # argmax of bfloat16 is slow
    return _shown(guessed, batch.gold, hidden, ratio, generator)


def _as_many_as(multiple: int, places: torch.Tensor) -> torch.Tensor:
    """bool as `places`, others among them until their number is a multiple, if there are enough."""
    missing = -int(places.sum()) % multiple
    others = (~places).flatten().nonzero()[:missing, 0]
    more = places.flatten().clone()
    more[others] = True
    return more.view_as(places)


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
