"""Training data as the drafter reads it: rows of kept tokens, a part held out."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.block_drafter.block_predictor import Source
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, SourceRule
from sglang_ext.block_drafter.kept_tokens import UNKNOWN, KeptTokens
from sglang_ext.block_drafter.states_on_disk import States, StatesOnDisk
from sglang_ext.block_drafter.training_data import Example, TrainingData, example_source

Rows = npt.NDArray[np.int64]
_HELD_OUT_PART = 0.02
_MOST_HELD_OUT = 500
_LEAST = 10
# As BlockPredictor reads it.
_EMPTY_SOURCE = np.array([UNKNOWN])


@dataclass(frozen=True)
class ReadPairs:
    """Examples as a drafter reads them.

    Attributes:
        sources: as BlockPredictor.encode takes them.
        outputs: int64[n] rows of each.
        written: the target's states at each output's tokens but the last, float16[n - 1, width];
            None: the drafter does not read them.
    """

    sources: Sequence[Source]
    outputs: Sequence[Rows]
    written: Sequence[States] | None = None


@dataclass(frozen=True)
class Pairs:
    """Examples, of which some are read at a time.

    Attributes:
        outputs: int64[n] rows of each.
        sources: int64[s] rows of each; None: the target's states are read.
        states: of the target, by example.
        examples: which of them each is.
    """

    outputs: Sequence[Rows]
    sources: Sequence[Rows] | None
    states: StatesOnDisk | None
    examples: Sequence[int]

    def __len__(self) -> int:
        return len(self.outputs)

    def source_lengths(self) -> npt.NDArray[np.int64]:
        """int64[n], tokens of each source."""
        if self.states is not None:
            return self.states.source_lengths[np.asarray(self.examples)]
        assert self.sources is not None
        return np.array([len(source) for source in self.sources])

    def read(self, which: Iterable[int]) -> ReadPairs:
        """Some of them, by their numbers here."""
        numbers = list(which)
        outputs = [self.outputs[i] for i in numbers]
        if self.states is None:
            assert self.sources is not None
            return ReadPairs([self.sources[i] for i in numbers], outputs)
        found = [self.states.read(self.examples[i]) for i in numbers]
        return ReadPairs([source for source, _ in found], outputs, [own for _, own in found])


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
    states: StatesOnDisk | None = None,
) -> TrainingSet:
    """Choose the kept tokens, and hold out every example of some sources.

    Those of the examples that were named as held out; where none was, 2% of them, by a hash.

    Args:
        states: of the target, by example; the sources' tokens are not read then.

    Raises:
        BlockDrafterError: there are too few different sources.
    """
    sources = [example_source(example, rule) for example in data.examples]
    learned_from, held = _divided(data.examples, [_digest(source) for source in sources])
    kept = KeptTokens.most_frequent(
        _counts(sources, vocab_size),
        _counts([example.output for example in data.examples], vocab_size),
        most_outputs,
        most_sources if states is None else 0,
        ends,
    )
    read = _rows(sources, kept) if states is None else None
    learned, kept_back = (
        _pairs(data.examples, read, states, kept, part) for part in (learned_from, held)
    )
    return TrainingSet(kept, learned, kept_back)


def as_pairs(
    data: TrainingData,
    rule: SourceRule,
    kept: KeptTokens,
    most: int,
    states: StatesOnDisk | None = None,
) -> Pairs:
    """The first `most` examples as a drafter reads them.

    Args:
        states: as `make_training_set` takes them.
    """
    examples = data.examples[:most]
    read = None
    if states is None:
        read = _rows([example_source(example, rule) for example in examples], kept)
    return _pairs(examples, read, states, kept, range(len(examples)))


def _rows(sources: Sequence[npt.NDArray[np.int32]], kept: KeptTokens) -> list[Rows]:
    found = (kept.rows(source) for source in sources)
    return [rows if len(rows) else _EMPTY_SOURCE for rows in found]


def _pairs(
    examples: Sequence[Example],
    sources: Sequence[Rows] | None,
    states: StatesOnDisk | None,
    kept: KeptTokens,
    which: Sequence[int],
) -> Pairs:
    found = None if sources is None else [sources[i] for i in which]
    outputs = [kept.output_rows(examples[i].output) for i in which]
    return Pairs(outputs, found, states, which)


def _digest(source: npt.NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(source.tobytes(), digest_size=8).digest()


def _divided(examples: Sequence[Example], digests: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Which examples are learned from, and which are held out.

    All of a source are on one side. Those held out are in the order of a hash, so that the first of
    them are some of all kinds.

    Args:
        digests: of each example's source.
    """
    different = sorted(set(digests))
    if len(different) < _LEAST:
        raise BlockDrafterError(
            f"the data has {len(different)} different sources; training needs {_LEAST} or more"
        )
    named = {digest for e, digest in zip(examples, digests, strict=True) if e.held_out}
    many = min(_MOST_HELD_OUT, max(2, round(_HELD_OUT_PART * len(different))))
    chosen = named or set(different[:many])
    held = sorted((d, i) for i, d in enumerate(digests) if d in chosen)
    learned = [i for i, digest in enumerate(digests) if digest not in chosen]
    if not learned:
        raise BlockDrafterError("every source of the data is held out: there is none to learn from")
    return learned, [i for _, i in held]


def _counts(sequences: Sequence[npt.NDArray[np.int32]], vocab_size: int) -> Rows:
    """int64[vocab_size], how often each token is there."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in sequences:
        np.add.at(counts, tokens, 1)
    return counts
