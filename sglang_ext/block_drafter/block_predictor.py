"""The block drafter as it is served: the source's keys and values kept, int8 on CPUs.

Computes what `BlockModel` computes, without dropout. What a request pays once is its encoder pass
and the decoder's keys and values of the source; a step is keys and values
of the tokens that were committed, one decoder pass of all requests, and a search for what stands
where.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.block_drafter.block_decoder import BlockDecoder
from sglang_ext.block_drafter.block_paths import Paths, PathSearch
from sglang_ext.block_drafter.kept_tokens import MASK, PADDING, UNKNOWN
from sglang_ext.block_drafter.nat_model import EARLIER, OF_SOURCE, BlockModel
from sglang_ext.block_drafter.request_memory import RequestMemory
from sglang_ext.block_drafter.served_entries import ServedEntries
from sglang_ext.block_drafter.served_layers import EncoderLayer, normed
from sglang_ext.block_drafter.states_on_disk import States

Rows = npt.NDArray[np.int64]
Source = Rows | States


@dataclass(frozen=True)
class Written:
    """The end of a request's output so far.

    Attributes:
        committed: its tokens.
        last: int64[EARLIER], rows of the last of them; PADDING where there are fewer.
    """

    committed: int
    last: Rows

    @classmethod
    def of_rows(cls, rows: Rows, committed: int) -> "Written":
        """Of an output whose last tokens are these rows, int64[m]."""
        return cls(committed, last_rows(rows))


@dataclass(frozen=True)
class Read:
    """Tokens of an output that are to be remembered.

    Attributes:
        tokens: int64[m] rows, or float16[m, states.width] where the drafter reads the target's
            states.
        places: int64[m], where in the output they are.
    """

    tokens: Source
    places: Rows


class BlockPredictor:
    """Encodes sources and predicts blocks."""

    @torch.inference_mode()
    def __init__(self, model: BlockModel, int8: bool, ends: Sequence[int] = ()) -> None:
        """What a model predicts.

        Args:
            int8: linear layers in 8-bit integers, which torch has on CPUs alone.
            ends: rows of tokens that end an output.
        """
        self._model = model.eval()
        self._shape = model.shape
        self._heads = model.shape.heads
        self._device = model.slots.device
        own = model.encoder.layers if model.states is None else ()
        self._encoder = [EncoderLayer(layer, int8) for layer in own]
        self._decoder = BlockDecoder(model, int8)
        self._entries = ServedEntries.of(model) if int8 else None
        self._paths = PathSearch(model, int8, ends)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile what a request calls, or read it from numba's cache, before one waits for it."""
        states, places = self._model.states, np.arange(1)
        read = np.zeros((1, states.width), np.float16) if states else np.array([UNKNOWN])
        memories = self.encode([read])
        self.write(memories, [Read(read, places)])
        self.predict(memories, [Written(1, last_rows(np.array([UNKNOWN])))], [1])

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> list[RequestMemory]:
        """What is kept of each source, a request's memory.

        Args:
            sources: int64[s] rows of each, an empty one counts as one unknown token; of a drafter
                that reads the target's states, float[s, states.width] with s at least 1.
        """
        if self._model.states is not None:
            return [
                self.remember(torch.from_numpy(states), torch.arange(len(states)))
                for states in sources
            ]
        rows_of = [rows if len(rows) else np.array([UNKNOWN]) for rows in sources]
        tokens = torch.from_numpy(padded(rows_of)).to(self._device)
        seen = (tokens != PADDING)[:, None, None]
        places = torch.arange(tokens.shape[1], device=self._device).expand_as(tokens)
        hidden = self._model.embedded(tokens, places)
        for layer in self._encoder:
            hidden = layer.run(hidden, seen, self._heads)
        encoded = normed(hidden, self._model.encoder.norm) + self._model.kinds[OF_SOURCE]
        kept = self._decoder.keys_values(encoded)
        return [
            self._memory(kept[i, :, :, : len(rows)], encoded[i, len(rows) - 1])
            for i, rows in enumerate(rows_of)
        ]

    @torch.inference_mode()
    def remember(self, states: torch.Tensor, places: torch.Tensor) -> RequestMemory:
        """What is kept of a source whose states the target has.

        Args:
            states: float[s, states.width].
            places: int64[s], where in the source each lies.
        """
        if self._entries is not None:
            return self._entries.of_source(states, places)
        memory = self._model.remembered(states.to(self._device)[None], places.to(self._device))
        return self._memory(self._decoder.keys_values(memory)[0], memory[0, -1])

    def _memory(self, keys_values: torch.Tensor, last: torch.Tensor) -> RequestMemory:
        return RequestMemory.of_source(keys_values, last, self._shape.window)

    @torch.inference_mode()
    def write(self, memories: Sequence[RequestMemory], read: Sequence[Read]) -> None:
        """Remember what was written since the last time, all of it but the last token.

        Args:
            read: of each request, in the output's order; may be nothing.
        """
        window = self._shape.window
        new = [
            (memory, each.tokens[-window:], each.places[-window:])
            for memory, each in zip(memories, read, strict=True)
            if len(each.places)
        ]
        if not new:
            return
        if self._entries is not None:
            self._entries.write(new)
            return
        entries = self._model.remembered(
            torch.from_numpy(padded([tokens for _, tokens, _ in new])).to(self._device),
            torch.from_numpy(padded([places for _, _, places in new])).to(self._device),
            written=True,
        )
        kept = self._decoder.keys_values(entries)
        for i, (memory, _, places) in enumerate(new):
            memory.add(kept[i, :, :, : len(places)], entries[i, len(places) - 1])

    @torch.inference_mode()
    def predict(
        self,
        memories: Sequence[RequestMemory],
        written: Sequence[Written],
        choices: Sequence[int],
        longest: int | None = None,
    ) -> list[Paths]:
        """What may follow in each request, one decoder pass for all.

        Args:
            memories: of `encode` or `remember`, with what `write` has brought.
            choices: of each request, how many paths are followed and how many tokens are tried
                behind each; 1: a chain.
            longest: most tokens of a path; default: the block's.
        """
        last = np.stack([each.last for each in written])
        committed = [each.committed for each in written]
        hidden = self._inputs(last[:, -1], committed, memories)
        places = self._decoder.run(hidden, memories)
        return self._paths.search(places, last, choices, longest or self._shape.block)

    def _inputs(
        self, last: Rows, committed: Sequence[int], memories: Sequence[RequestMemory]
    ) -> torch.Tensor:
        """float[n, 1 + block, width], the decoder's."""
        if self._entries is not None:
            return self._entries.slots_of(last, committed, memories)
        rows = torch.from_numpy(block_inputs(last, self._shape.block)).to(self._device)
        told = self._model.of_before(torch.stack([memory.last for memory in memories]))
        return self._model.slots_of(rows, torch.tensor(committed, device=self._device), told)


def last_rows(rows: Rows) -> Rows:
    """int64[EARLIER], the last rows of an output, PADDING before them where there are fewer."""
    found = np.full(EARLIER, PADDING, dtype=np.int64)
    tail = rows[-EARLIER:]
    found[EARLIER - len(tail) :] = tail
    return found


def block_inputs(last: Sequence[int] | Rows, block: int) -> Rows:
    """int64[n, 1 + block], the decoder's inputs: the last committed tokens' rows, then masks."""
    tokens = np.full((len(last), 1 + block), MASK, dtype=np.int64)
    tokens[:, 0] = last
    return tokens


def padded(sequences: Sequence[Source], multiple: int = 1) -> Rows | npt.NDArray[np.float32]:
    """Sequences as one array: int64[n, longest], PADDING behind each's rows.

    Of states float32[n, longest, width], zeros behind each's.

    Args:
        multiple: of which `longest` is one.
    """
    first = sequences[0]
    kind = np.float32 if first.ndim == 2 else np.int64
    longest = -(-max(map(len, sequences)) // multiple) * multiple
    joined = np.full((len(sequences), longest, *first.shape[1:]), PADDING, dtype=kind)
    for row, sequence in zip(joined, sequences, strict=True):
        row[: len(sequence)] = sequence
    return joined
