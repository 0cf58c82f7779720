"""Accepted tokens a step with a block drafter: SpecDec's loop, replayed on known outputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.block_drafter.block_predictor import BlockPredictor, Read, Written
from sglang_ext.block_drafter.kept_tokens import UNKNOWN
from sglang_ext.block_drafter.request_memory import RequestMemory
from sglang_ext.block_drafter.training_set import Pairs, ReadPairs

Rows = npt.NDArray[np.int64]
_BATCH = 32


@dataclass
class Accepted:
    """Totals of a replay.

    Attributes:
        tokens: committed, those of the prefills (one an output) left out.
        steps: target passes that committed them.
    """

    tokens: int = 0
    steps: int = 0

    @property
    def per_step(self) -> float:
        """Accept length: tokens a step commits, the target's own one included; 0 without steps."""
        return self.tokens / self.steps if self.steps else 0.0


def replay(predictor: BlockPredictor, pairs: Pairs, block: int, most: int) -> Accepted:
    """Decode known greedy outputs by drafted chains of `block` tokens, exactly as a server would.

    A step drafts, keeps the tokens up to the first that is not the output's, and commits the
    output's own behind them. The first token of an output is its prefill's.

    Args:
        pairs: of which the first `most` are decoded; a token that cannot be drafted is UNKNOWN.
    """
    accepted = Accepted()
    end = min(most, len(pairs))
    for first in range(0, end, _BATCH):
        part = pairs.read(range(first, min(first + _BATCH, end)))
        memories = predictor.encode(part.sources)
        _replay_batch(predictor, memories, part, block, accepted)
    return accepted


def _replay_batch(
    predictor: BlockPredictor,
    memories: Sequence[RequestMemory],
    pairs: ReadPairs,
    block: int,
    accepted: Accepted,
) -> None:
    outputs = pairs.outputs
    done, read = [1] * len(outputs), [0] * len(outputs)
    running = [i for i, output in enumerate(outputs) if len(output) > 1]
    while running:
        own = [memories[i] for i in running]
        predictor.write(own, [_read(pairs, i, read[i], done[i] - 1) for i in running])
        for i in running:
            read[i] = done[i] - 1
        blocks = predictor.predict(
            own,
            [Written.of_rows(outputs[i][: done[i]], done[i]) for i in running],
            [1] * len(running),
            block,
        )
        for i, drafted in zip(running, blocks, strict=True):
            rest = outputs[i][done[i] :]
            committed = min(agreed(drafted.likeliest(), rest) + 1, len(rest))
            done[i] += committed
            accepted.tokens += committed
            accepted.steps += 1
        running = [i for i in running if done[i] < len(outputs[i])]


def _read(pairs: ReadPairs, number: int, first: int, end: int) -> Read:
    """Tokens first:end of an output."""
    rows = pairs.outputs[number] if pairs.written is None else pairs.written[number]
    return Read(rows[first:end], np.arange(first, end))


def agreed(drafted: Rows, output: Rows) -> int:
    """How many drafted tokens, from the first on, are the output's; UNKNOWN never is."""
    n = min(len(drafted), len(output))
    wrong = (drafted[:n] != output[:n]) | (drafted[:n] == UNKNOWN)
    return int(wrong.argmax()) if wrong.any() else n
