"""Training data as the drafter reads it: rows of kept tokens, a part held out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.block_drafter.block_predictor import Source, States
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, SourceRule
from sglang_ext.block_drafter.kept_tokens import UNKNOWN, KeptTokens
from sglang_ext.block_drafter.training_data import Example, TrainingData, example_source

Rows = npt.NDArray[np.int64]
_HELD_OUT_PART = 0.02
_MOST_HELD_OUT = 500
_LEAST = 10
# As BlockPredictor reads it.
_EMPTY_SOURCE = np.array([UNKNOWN])


@dataclass(frozen=True)
class Pairs:
    """Sources of examples, as BlockPredictor.encode takes them, and outputs, int64[n] rows each."""

    sources: Sequence[Source]
    outputs: Sequence[Rows]

    def __len__(self) -> int:
        return len(self.outputs)


@dataclass(frozen=True)
class TrainingSet:
    """What is learned from, and what is held out to see how well."""

    kept: KeptTokens
    learned: Pairs
    held_out: Pairs


def make_training_set(
    data: TrainingData,
    rule: SourceRule,
    ends: Sequence[int],
    vocab_size: int,
    most_outputs: int,
    most_sources: int,
    states: Sequence[States] | None = None,
) -> TrainingSet:
    """Choose the kept tokens, and hold out every example of some sources.

    Args:
        states: of the target, of each example's source; its tokens are not read then.

    Raises:
        BlockDrafterError: there are too few different sources.
    """
    sources = [example_source(example, rule) for example in data.examples]
    held = _held_out(sources)
    kept = KeptTokens.most_frequent(
        _counts(sources, vocab_size),
        _counts([example.output for example in data.examples], vocab_size),
        most_outputs,
        most_sources if states is None else 0,
        ends,
    )
    read = _rows(sources, kept) if states is None else states
    return TrainingSet(
        kept,
        _pairs(data.examples, read, kept, [i for i in range(len(held)) if not held[i]]),
        _pairs(data.examples, read, kept, [i for i in range(len(held)) if held[i]]),
    )


def as_pairs(
    data: TrainingData,
    rule: SourceRule,
    kept: KeptTokens,
    most: int,
    states: Sequence[States] | None = None,
) -> Pairs:
    """The first `most` examples as a drafter reads them.

    Args:
        states: as `make_training_set` takes them.
    """
    examples = data.examples[:most]
    read: Sequence[Source] | None = states
    if read is None:
        read = _rows([example_source(example, rule) for example in examples], kept)
    return _pairs(examples, read, kept, range(len(examples)))


def _rows(sources: Sequence[npt.NDArray[np.int32]], kept: KeptTokens) -> list[Rows]:
    found = (kept.rows(source) for source in sources)
    return [rows if len(rows) else _EMPTY_SOURCE for rows in found]


def _pairs(
    examples: Sequence[Example],
    sources: Sequence[Source],
    kept: KeptTokens,
    which: Sequence[int],
) -> Pairs:
    found = [sources[i] for i in which]
    return Pairs(found, [kept.output_rows(examples[i].output) for i in which])


def _held_out(sources: Sequence[npt.NDArray[np.int32]]) -> list[bool]:
    """Which examples are held out: all of a source, so that none of them was learned from."""
    digests = [hashlib.blake2b(s.tobytes(), digest_size=8).digest() for s in sources]
    different = sorted(set(digests))
    if len(different) < _LEAST:
        raise BlockDrafterError(
            f"the data has {len(different)} different sources; training needs {_LEAST} or more"
        )
    many = min(_MOST_HELD_OUT, max(2, round(_HELD_OUT_PART * len(different))))
    chosen = set(different[:many])
    return [digest in chosen for digest in digests]


def _counts(sequences: Sequence[npt.NDArray[np.int32]], vocab_size: int) -> Rows:
    """int64[vocab_size], how often each token is there."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in sequences:
        np.add.at(counts, tokens, 1)
    return counts
