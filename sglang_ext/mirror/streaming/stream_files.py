"""A folder of trained streams: written as a whole, and checked when it is read.

streams.json          what they are of, what they learned from, how good they are
streams.safetensors   their tensors (lookahead_streams.py)
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from sglang_ext.block_drafter.drafter_files import read_weights, write_file
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, read_json
from sglang_ext.mirror.streaming.lookahead_streams import LookaheadStreams

NAME, WEIGHTS = "streams.json", "streams.safetensors"
FORMAT, KIND = 1, "streaming"
_MOST_SIZE = 1 << 16
# Of a weight file: so many samples over its whole length, as fine-tuned models may begin alike.
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


class StreamsError(BlockDrafterError):
    """A folder of streams cannot be used; the message says why, in one line."""


@dataclass(frozen=True)
class StreamManifest:
    """What streams.json states.

    Attributes:
        draft: fingerprint of the draft model (`draft_fingerprint`); `draft_name` its name.
        target: the model whose outputs they learned from.
        streams, rank, layers: their sizes.
        weights: SHA-256 of streams.safetensors.
        data: what they learned from: outputs, tokens, and tokens by namespace.
        training: how.
        scores: of held-out outputs, the share of tokens that each stream foresees.
    """

    draft: str
    draft_name: str
    target: str
    streams: int
    rank: int
    layers: int
    weights: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)

    @property
    def namespaces(self) -> Mapping[str, int]:
        """Output tokens that they learned from, by namespace."""
        return self.data.get("namespaces", {})

    def as_json(self) -> str:
        """What streams.json holds."""
        return json.dumps({"format": FORMAT, "kind": KIND, **asdict(self)}, indent=1) + "\n"

    def check(self) -> None:
        """Refuse what no training writes.

        Raises:
            ValueError: a field is of another kind; the message names it.
        """
        for name in ("draft", "draft_name", "target", "weights"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a text")
        for name in ("streams", "rank", "layers"):
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= _MOST_SIZE:
                raise ValueError(f"{name} must be a whole number of 1 to {_MOST_SIZE}")
        for name in ("data", "training", "scores"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name} must be an object")
        tokens = self.namespaces
        if not isinstance(tokens, dict) or any(type(n) is not int for n in tokens.values()):
            raise ValueError("data.namespaces must hold numbers of tokens")


def draft_fingerprint(folder: str | Path) -> str:
    """What tells draft models apart: the sizes of a model's weight files, and samples of them.

    Raises:
        StreamsError: there are none.
    """
    found = hashlib.blake2b(digest_size=16)
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise StreamsError(f"{folder} has no *.safetensors")
    for path in files:
        size = path.stat().st_size
        found.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(size * number // _SAMPLES)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def write_streams(
    folder: Path, manifest: StreamManifest, streams: LookaheadStreams
) -> StreamManifest:
    """Write a folder, the weights first; returns the manifest with their checksum.

    Raises:
        BlockDrafterError: it cannot be written.
    """
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in streams.tensors()})
    manifest = replace(manifest, weights=hashlib.sha256(data).hexdigest())
    write_file(folder / WEIGHTS, data)
    write_file(folder / NAME, manifest.as_json().encode())
    return manifest


def read_stream_manifest(folder: str | Path) -> StreamManifest:
    """What a folder of streams states.

    Raises:
        StreamsError: there is no such folder, or its manifest is damaged or of another format.
    """
    path = Path(folder) / NAME
    content = read_json(path, f"{folder} holds no streams: it has no {NAME}", StreamsError)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise StreamsError(f"{path} is damaged, or of another format than {FORMAT}")
    if content.pop("kind", None) != KIND:
        raise StreamsError(f"{path} is damaged: its kind is not {KIND}")
    try:
        manifest = StreamManifest(**content)
        manifest.check()
    except (TypeError, ValueError) as error:
        raise StreamsError(f"{path} is damaged: {error}") from None
    return manifest


def load_streams(folder: str | Path, draft: str | Path) -> tuple[StreamManifest, LookaheadStreams]:
    """Read a folder, everything in it checked.

    Args:
        draft: the draft model's folder.

    Raises:
        StreamsError: a file is missing or damaged, or they are another draft model's.
    """
    manifest = read_stream_manifest(folder)
    if manifest.draft != draft_fingerprint(draft):
        raise StreamsError(f"{folder} has streams of {manifest.draft_name}, not of {draft}")
    path = Path(folder) / WEIGHTS
    data = read_weights(path, manifest.weights, NAME, StreamsError)
    try:
        tensors = load(data)
        if odd := sorted(name for name, tensor in tensors.items() if not _is_sound(tensor)):
            raise ValueError(f"{odd[0]} is no matrix of finite numbers")
        streams = LookaheadStreams.of(tensors, manifest.layers)
    except (SafetensorError, KeyError, ValueError) as error:
        raise StreamsError(f"{path} does not fit {NAME}: {error}") from None
    if (len(streams), streams.rank) != (manifest.streams, manifest.rank):
        raise StreamsError(
            f"{path} does not fit {NAME}: {len(streams)} streams of rank {streams.rank}"
        )
    return manifest, streams


def _is_sound(tensor: torch.Tensor) -> bool:
    matrix = tensor.dim() == 2 and tensor.is_floating_point()
    return matrix and bool(tensor.isfinite().all())
