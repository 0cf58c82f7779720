"""The target's states of training examples: read once by the target, kept on the disk meanwhile.

What a drafter with a shared encoder reads in place of tokens: the residual stream at the tokens of
the source, of what stands behind it in the prompt and of the output, behind some of the target's
layers, made even (`even_states`). The target is transformers' model, run as far as that layer; what
all prompts begin with it reads once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch.nn.functional import layer_norm

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, SourceRule
from sglang_ext.block_drafter.shapes import TargetStates
from sglang_ext.block_drafter.states_on_disk import StatesOnDisk
from sglang_ext.block_drafter.target_models import layer_to_read
from sglang_ext.block_drafter.training_data import Tokens, TrainingData, source_span
from sglang_ext.models import resolve

if TYPE_CHECKING:
    from transformers import DynamicCache

NAME = "states.f16"
# Texts that the target reads at once, and of how many times as many those of about one length.
_AT_ONCE, _ALIKE = 16, 16


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
        bf16: whether it runs in bfloat16; else in float32.

    Attributes:
        states: what is read.

    Raises:
        BlockDrafterError: the target cannot be loaded, or has no such layer.
    """

    def __init__(self, model: str, layer: int, device: str = "cpu", *, bf16: bool = False) -> None:
        from transformers import AutoModel

        dtype = torch.bfloat16 if bf16 else torch.float32

        try:
            made = AutoModel.from_pretrained(resolve(model), dtype=dtype)
        except Exception as error:  # of many kinds: no files, no network, damaged weights
            reason = " ".join(str(error).split())[:200]
            raise BlockDrafterError(f"{model}: cannot be loaded as a target: {reason}") from None
        config = made.config.get_text_config()
        depth = config.num_hidden_layers
        layer = layer_to_read(model, depth, layer, "--encoder-layer")
        lists = (
            m for m in made.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth
        )
        layers = next(lists, None)
        if layers is None:
            raise BlockDrafterError(f"{model} has no list of {depth} decoder layers to read from")
        self._model, self._device = made.to(device).eval(), device
        self._seen: torch.Tensor | None = None
        self._template: Tokens = np.empty(0, np.int32)
        self._keys_values: list[tuple[torch.Tensor, torch.Tensor]] = []
        layers[layer].register_forward_pre_hook(self._take, with_kwargs=True)
        self.states = TargetStates(layer, config.hidden_size)

    @torch.inference_mode()
    def begin_with(self, template: Tokens) -> None:
        """Read what prompts begin with, int32[p], once for all that do."""
        from transformers import DynamicCache

        self._template, self._keys_values = template[:0], []
        if not len(template):
            return
        cache = DynamicCache()
        self._run([template], cache)
        layers = cache.layers[: self.states.layer]
        # Others (of a window, of states as Mamba's) cannot be handed on: prompts are read whole.
        if all(type(each).__name__ == "DynamicLayer" and each.keys is not None for each in layers):
            self._template = template
            self._keys_values = [(each.keys, each.values) for each in layers]

    @torch.inference_mode()
    def read(self, prompts: Sequence[Tokens], spans: Sequence[slice]) -> list[torch.Tensor]:
        """float16[s, width] of each prompt, the states of the tokens within its span."""
        shared = len(self._template)
        if any(
            span.start < shared or not np.array_equal(prompt[:shared], self._template)
            for prompt, span in zip(prompts, spans, strict=True)
        ):
            shared = 0
        read = [prompt[shared : span.stop] for prompt, span in zip(prompts, spans, strict=True)]
        seen = even_states(self._run(read, self._behind_template(len(read)) if shared else None))
        return [
            row[span.start - shared : span.stop - shared]
            for row, span in zip(seen.cpu(), spans, strict=True)
        ]

    def _behind_template(self, prompts: int) -> "DynamicCache":
        """A cache in which so many prompts begin with the template."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, pair in enumerate(self._keys_values):
            cache.update(*(each.expand(prompts, -1, -1, -1) for each in pair), layer)
        return cache

    def _run(self, rows: Sequence[Tokens], cache: "DynamicCache | None") -> torch.Tensor:
        """float[n, longest, width], the states of rows behind what a cache holds.

        Behind a row's end there is anything: no token sees those behind it.
        """
        tokens = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.long)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = torch.from_numpy(row.astype(np.int64))
        with suppress(_ReadEnoughError):
            self._model(tokens.to(self._device), past_key_values=cache, use_cache=cache is not None)
        assert self._seen is not None
        return self._seen

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
) -> Iterator[StatesOnDisk]:
    """The states of each example, in a file within `folder` that is removed behind it.

    Of a source to the prompt's end, and of the output but for its last token.

    What a kill leaves is gone on with. An error leaves the file as well.

    Args:
        tell: gets the number of examples that have been read.

    Raises:
        BlockDrafterError: the file cannot be written.
    """
    path = folder / f"{data.digest()}-{reader.states.layer}.{NAME}"
    reader.begin_with(np.array(rule.before, np.int32))
    firsts = [source_span(example.prompt, rule).start for example in data.examples]
    sources = [len(e.prompt) - first for e, first in zip(data.examples, firsts, strict=True)]
    outputs = [len(example.output) - 1 for example in data.examples]
    ends = np.cumsum(np.add(sources, outputs))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        seconds = _write(path, data, firsts, ends, reader, tell)
        begins = np.concatenate([[0], ends[:-1]])
        paths = [path] * len(begins)
        states = StatesOnDisk(paths, begins, sources, outputs, reader.states.width, seconds)
    except OSError as error:
        raise BlockDrafterError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        yield states
    finally:
        states.close()
    for each in (path, _time_of(path)):
        each.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _write(
    path: Path,
    data: TrainingData,
    firsts: Sequence[int],
    ends: np.ndarray,
    reader: StatesReader,
    tell: Callable[[int], None],
) -> float:
    """Append what is missing, in the examples' order; a full disk is an OSError, not a signal.

    Returns:
        seconds that reading took, before kills too.
    """
    row_bytes = 2 * reader.states.width
    size = path.stat().st_size if path.is_file() else 0
    texts = [np.concatenate([e.prompt, e.output[:-1]]) for e in data.examples]
    done = int(np.searchsorted(ends, size // row_bytes, side="right"))
    kept = row_bytes * int(ends[done - 1]) if done else 0
    with open(path, "ab") as file:
        if size > kept:
            file.truncate(kept)
        seconds = _read_time(path) if done else 0.0
        for number in range(done, len(texts), _AT_ONCE * _ALIKE):
            began = time.monotonic()
            _write_part(file, slice(number, number + _AT_ONCE * _ALIKE), texts, firsts, reader)
            seconds += time.monotonic() - began
            _time_of(path).write_text(f"{seconds:.1f}")
            tell(min(number + _AT_ONCE * _ALIKE, len(texts)))
    return seconds


def _time_of(path: Path) -> Path:
    """Where the seconds are kept that reading took so far."""
    return path.with_suffix(".seconds")


def _read_time(path: Path) -> float:
    try:
        return float(_time_of(path).read_text())
    except (OSError, ValueError):  # a kill may have left none
        return 0.0


def _write_part(
    file: BinaryIO,
    part: slice,
    texts: Sequence[Tokens],
    firsts: Sequence[int],
    reader: StatesReader,
) -> None:
    """Some texts' states in their order; texts of about one length are read together."""
    own, begins = texts[part], firsts[part]
    states: dict[int, bytes] = {}
    order = sorted(range(len(own)), key=lambda i: len(own[i]))
    for first in range(0, len(own), _AT_ONCE):
        which = order[first : first + _AT_ONCE]
        spans = [slice(begins[i], len(own[i])) for i in which]
        found = reader.read([own[i] for i in which], spans)
        states |= {i: each.numpy().tobytes() for i, each in zip(which, found, strict=True)}
    for i in range(len(own)):
        file.write(states[i])
