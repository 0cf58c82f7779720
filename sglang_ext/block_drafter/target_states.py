"""The target's states of training sources: read once by the target, kept on the disk meanwhile.

What a drafter with a shared encoder reads in place of tokens: the residual stream at the source's
tokens, behind some of the target's layers, made even (`even_states`). The target is transformers'
model, in float32, run as far as that layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import layer_norm

from sglang_ext.block_drafter.block_predictor import States
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, SourceRule
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.training_data import Tokens, TrainingData, source_span
from sglang_ext.models import resolve

NAME = "states.f16"
# Prompts that the target reads at once.
_AT_ONCE = 16


class _ReadEnoughError(Exception):
    """Ends a pass of the target behind the layer that is read."""


def even_states(states: torch.Tensor) -> torch.Tensor:
    """float16[n, width] of the same in any precision: each state with mean 0 and variance 1.

    A few numbers of a residual stream can be beyond float16; what it says lies in its direction.
    """
    return layer_norm(states.float(), states.shape[-1:]).half()


class StatesReader:
    """Reads prompts with the target.

    Args:
        model: a name of `sglang-ext models list`, a path or a hub id.
        layer: behind so many layers; 0: two thirds of them.
        device: torch's name of where it runs.

    Attributes:
        states: what is read.

    Raises:
        BlockDrafterError: the target cannot be loaded, or has no such layer.
    """

    def __init__(self, model: str, layer: int, device: str = "cpu") -> None:
        from transformers import AutoModel

        try:
            made = AutoModel.from_pretrained(resolve(model), dtype=torch.float32)
        except Exception as error:  # of many kinds: no files, no network, damaged weights
            reason = " ".join(str(error).split())[:200]
            raise BlockDrafterError(f"{model}: cannot be loaded as a target: {reason}") from None
        config = made.config.get_text_config()
        depth = config.num_hidden_layers
        layer = layer or max(1, 2 * depth // 3)
        if not 1 <= layer < depth:
            raise BlockDrafterError(
                f"--encoder-layer {layer}: {model} has {depth} layers, expected 1 to {depth - 1}"
            )
        lists = (
            m for m in made.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth
        )
        layers = next(lists, None)
        if layers is None:
            raise BlockDrafterError(f"{model} has no list of {depth} decoder layers to read from")
        self._model, self._device = made.to(device).eval(), device
        self._seen: torch.Tensor | None = None
        layers[layer].register_forward_pre_hook(self._take, with_kwargs=True)
        self.states = TargetStates(layer, config.hidden_size)

    @torch.inference_mode()
    def read(self, prompts: Sequence[Tokens]) -> torch.Tensor:
        """float16[n, longest, width], the states of each prompt's tokens, anything behind them."""
        longest = max(map(len, prompts))
        tokens = torch.zeros((len(prompts), longest), dtype=torch.long)
        there = torch.zeros_like(tokens)
        for row, mask, prompt in zip(tokens, there, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
            mask[: len(prompt)] = 1
        with suppress(_ReadEnoughError):
            self._model(tokens.to(self._device), attention_mask=there.to(self._device))
        assert self._seen is not None
        return even_states(self._seen).cpu()

    def _take(self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen = args[0] if args else kwargs["hidden_states"]
        raise _ReadEnoughError


def check_examples(data: TrainingData) -> None:
    """Refuse data of which the target cannot read the prompts.

    Raises:
        BlockDrafterError: it holds parts of prompts alone.
    """
    if not data.whole_prompts or any(example.is_source for example in data.examples):
        raise BlockDrafterError(
            f"{data.origin} does not hold whole prompts, which --encoder target reads; "
            "use --encoder own, or outputs of `drafter distill`"
        )


@contextmanager
def kept_states(
    folder: Path,
    data: TrainingData,
    rule: SourceRule,
    reader: StatesReader,
    tell: Callable[[int], None] = lambda read: None,
) -> Iterator[list[States]]:
    """The states of each example's source, in a file within `folder` that is removed behind it.

    What a kill leaves is gone on with. An error leaves the file as well.

    Args:
        tell: gets the number of examples that have been read.

    Raises:
        BlockDrafterError: the file cannot be written.
    """
    path = folder / f"{data.digest()}-{reader.states.layer}.{NAME}"
    spans = [source_span(example.prompt, rule) for example in data.examples]
    ends = np.cumsum([span.stop - span.start for span in spans])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, data, spans, ends, reader, tell)
    except OSError as error:
        raise BlockDrafterError(f"cannot write {path}: {error.strerror or error}") from None
    rows = np.memmap(path, np.float16, "r", shape=(int(ends[-1]), reader.states.width))
    yield np.split(rows, ends[:-1])
    del rows
    path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _write(
    path: Path,
    data: TrainingData,
    spans: Sequence[slice],
    ends: np.ndarray,
    reader: StatesReader,
    tell: Callable[[int], None],
) -> None:
    """Append what is missing, example by example; a full disk is an OSError here, not a signal."""
    row_bytes = 2 * reader.states.width
    size = path.stat().st_size if path.is_file() else 0
    done = int(np.searchsorted(ends, size // row_bytes, side="right"))
    kept = row_bytes * int(ends[done - 1]) if done else 0
    with open(path, "ab") as file:
        if size > kept:
            file.truncate(kept)
        for first in range(done, len(spans), _AT_ONCE):
            examples = data.examples[first : first + _AT_ONCE]
            states = reader.read([example.prompt for example in examples])
            for i in range(len(examples)):
                file.write(states[i, spans[first + i]].numpy().tobytes())
            tell(first + len(examples))
