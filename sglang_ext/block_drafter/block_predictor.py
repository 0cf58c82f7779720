"""The block drafter as it is served: the source's keys and values kept, int8 on CPUs.

Computes what `BlockModel` computes, without dropout. What a request pays once is its encoder pass
and the decoder's keys and values of the source; a step is one decoder pass of all requests, keys
and values of the last tokens that they have written, and a search for what stands where.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.block_drafter.block_paths import Paths, PathSearch
from sglang_ext.block_drafter.kept_tokens import MASK, PADDING, UNKNOWN
from sglang_ext.block_drafter.nat_model import EARLIER, OF_SOURCE, BlockModel
from sglang_ext.block_drafter.served_layers import DecoderLayer, EncoderLayer, normed
from sglang_ext.block_drafter.states_on_disk import States

Rows = npt.NDArray[np.int64]
Source = Rows | States


@dataclass(frozen=True)
class SourceMemory:
    """What is kept of a source.

    Attributes:
        keys_values: float32[decoder layers, 2, heads, s, width / heads].
        last: float32[width], its last entry.
    """

    keys_values: torch.Tensor
    last: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.keys_values.nbytes + self.last.nbytes


@dataclass(frozen=True)
class Written:
    """The output of a request so far.

    Attributes:
        committed: its tokens.
        last: int64[EARLIER], rows of the last of them; PADDING where there are fewer.
        read: of some of the tokens before that one the rows, int64[m], or float16[m, states.width]
            where the drafter reads the target's states; the last `window` of them are enough.
        places: int64[m], where in the output they are.
    """

    committed: int
    last: Rows
    read: Source
    places: Rows

    @classmethod
    def of_rows(cls, rows: Rows, committed: int) -> "Written":
        """Of a request whose last tokens are these rows, int64[m]."""
        before = rows[:-1]
        places = committed - 1 - len(before) + np.arange(len(before))
        return cls(committed, last_rows(rows), before, places)


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
        self._decoder = [DecoderLayer(layer, int8) for layer in model.decoder.layers]
        self._paths = PathSearch(model, int8, ends)

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> list[SourceMemory]:
        """What is kept of each source.

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
        kept = self._keys_values(encoded)
        return [
            SourceMemory(kept[i, :, :, :, : len(rows)].clone(), encoded[i, len(rows) - 1].clone())
            for i, rows in enumerate(rows_of)
        ]

    @torch.inference_mode()
    def remember(self, states: torch.Tensor, places: torch.Tensor) -> SourceMemory:
        """What is kept of a source whose states the target has.

        Args:
            states: float[s, states.width].
            places: int64[s], where in the source each lies.
        """
        memory = self._model.remembered(states.to(self._device)[None], places.to(self._device))
        return SourceMemory(self._keys_values(memory)[0], memory[0, -1].clone())

    def _keys_values(self, memory: torch.Tensor) -> torch.Tensor:
        """float[n, decoder layers, 2, heads, s, width / heads] of float[n, s, width]."""
        return torch.stack([layer.keys_values(memory, self._heads) for layer in self._decoder], 1)

    @torch.inference_mode()
    def predict(
        self,
        memories: Sequence[SourceMemory],
        written: Sequence[Written],
        choices: Sequence[int],
        longest: int | None = None,
    ) -> list[Paths]:
        """What may follow in each request, one decoder pass for all.

        Args:
            memories: of `encode` or `remember`.
            choices: of each request, how many paths are followed and how many tokens are tried
                behind each; 1: a chain.
            longest: most tokens of a path; default: the block's.
        """
        last = np.stack([each.last for each in written])
        rows = torch.from_numpy(block_inputs(last[:, -1], self._shape.block)).to(self._device)
        committed = torch.tensor([each.committed for each in written], device=self._device)
        own = self._of_written(written)
        before = torch.stack(
            [
                source.last if entries.last is None else entries.last
                for source, entries in zip(memories, own, strict=True)
            ]
        )
        hidden = self._model.slots_of(rows, committed, self._model.of_before(before))
        kept, read = _together(
            [
                torch.cat([memory.keys_values, entries.keys_values], dim=3)
                for memory, entries in zip(memories, own, strict=True)
            ]
        )
        for number, layer in enumerate(self._decoder):
            hidden = layer.run(hidden, kept[:, number], read, self._heads)
        places = normed(hidden[:, 1:], self._model.decoder.norm)
        return self._paths.search(places, last, choices, longest or self._shape.block)

    def _of_written(self, written: Sequence[Written]) -> list["_Entries"]:
        """Of each output."""
        window = self._shape.window
        read = [each.read[-window:] for each in written]
        if not any(map(len, read)):
            shape = self._shape
            sizes = (shape.decoder_layers, 2, self._heads, 0, shape.width // self._heads)
            return [_Entries(torch.empty(sizes, device=self._device), None)] * len(read)
        places = [each.places[-window:] for each in written]
        memory = self._model.remembered(
            torch.from_numpy(padded(read)).to(self._device),
            torch.from_numpy(padded(places)).to(self._device),
            written=True,
        )
        kept = self._keys_values(memory)
        return [
            _Entries(kept[i, :, :, :, : len(own)], memory[i, len(own) - 1] if len(own) else None)
            for i, own in enumerate(read)
        ]


@dataclass(frozen=True)
class _Entries:
    """Of an output's last tokens: keys and values as a SourceMemory's, the last entry if any."""

    keys_values: torch.Tensor
    last: torch.Tensor | None


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


def _together(kept: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memories of different lengths as one tensor, and where each has entries (None: all)."""
    lengths = [memory.shape[3] for memory in kept]
    longest = max(lengths)
    if min(lengths) == longest:
        return torch.stack(list(kept)), None
    shape = (len(kept), *kept[0].shape[:3], longest, kept[0].shape[4])
    joined = kept[0].new_zeros(shape)
    for row, memory in zip(joined, kept, strict=True):
        row[..., : memory.shape[3], :] = memory
    ends = torch.tensor(lengths, device=joined.device)
    present = torch.arange(longest, device=joined.device) < ends[:, None]
    return joined, present[:, None, None]
