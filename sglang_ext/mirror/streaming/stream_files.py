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

from safetensors import SafetensorError
from safetensors.torch import load, save

from sglang_ext.block_drafter.drafter_files import write_file
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.mirror.streaming.lookahead_streams import LookaheadStreams

NAME, WEIGHTS = "streams.json", "streams.safetensors"
FORMAT = 1
_MAX_BYTES = 1 << 24
_HASHED_BYTES = 1 << 20


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
        return json.dumps({"format": FORMAT, "kind": "streaming", **asdict(self)}, indent=1) + "\n"


def draft_fingerprint(folder: str | Path) -> str:
    """What tells draft models apart: the sizes and beginnings of a model's weight files.

    Raises:
        StreamsError: there are none.
    """
    found = hashlib.blake2b(digest_size=16)
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise StreamsError(f"{folder} has no *.safetensors")
    for path in files:
        with path.open("rb") as file:
            found.update(path.stat().st_size.to_bytes(8, "little") + file.read(_HASHED_BYTES))
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
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise StreamsError(f"{path} is damaged: it is too large for a manifest")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StreamsError(f"{folder} holds no streams: it has no {NAME}") from None
    except OSError as error:
        raise StreamsError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise StreamsError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise StreamsError(f"{path} is damaged, or of another format than {FORMAT}")
    content.pop("kind", None)
    try:
        manifest = StreamManifest(**content)
        sizes = (manifest.streams, manifest.rank, manifest.layers)
        if any(type(size) is not int or not 1 <= size <= 1 << 16 for size in sizes):
            raise ValueError("streams, rank and layers must be whole numbers from 1")
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
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StreamsError(f"cannot read {path}: {error.strerror or error}") from None
    if hashlib.sha256(data).hexdigest() != manifest.weights:
        raise StreamsError(f"{path} is damaged: its checksum is not the one in {NAME}")
    try:
        streams = LookaheadStreams.of(load(data), manifest.layers)
    except (SafetensorError, KeyError) as error:
        raise StreamsError(f"{path} does not fit {NAME}: {error}") from None
    if len(streams) != manifest.streams:
        raise StreamsError(f"{path} does not fit {NAME}: {len(streams)} streams")
    return manifest, streams
