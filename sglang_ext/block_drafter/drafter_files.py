"""A drafter's directory: written as a whole, and checked when it is read.

drafter.json        the manifest (drafter_manifest.py)
model.safetensors   the network's weights, and `kept_tokens`, int32[n], the token ids it knows
"""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from sglang_ext.block_drafter.drafter_manifest import (
    NAME,
    BlockDrafterError,
    Manifest,
    read_manifest,
)
from sglang_ext.block_drafter.kept_tokens import KeptTokens
from sglang_ext.block_drafter.nat_model import BlockModel

WEIGHTS = "model.safetensors"
_KEPT = "kept_tokens"


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter as its directory holds it."""

    manifest: Manifest
    kept: KeptTokens
    model: BlockModel


def save_drafter(folder: Path, manifest: Manifest, model: BlockModel, kept: KeptTokens) -> Manifest:
    """Write a directory, the weights first; a reader finds the old drafter or the new one.

    Returns:
        the manifest with the weights' checksum, as written.

    Raises:
        BlockDrafterError: it cannot be written.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    tensors[_KEPT] = torch.from_numpy(kept.tokens).to(torch.int32)
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    manifest = replace(manifest, weights=hashlib.sha256(data).hexdigest())
    write_file(folder / WEIGHTS, data)
    write_file(folder / NAME, manifest.as_json().encode())
    return manifest


def load_drafter(folder: str | Path, device: str = "cpu") -> LoadedDrafter:
    """Read a directory, everything in it checked.

    Raises:
        BlockDrafterError: a file is missing or damaged; the message names it.
    """
    manifest = read_manifest(folder)
    path = Path(folder) / WEIGHTS
    data = read_weights(path, manifest.weights, NAME)
    try:
        tensors = load(data)
        kept = KeptTokens(tensors.pop(_KEPT).long().numpy(), manifest.outputs, manifest.vocab_size)
        model = BlockModel(manifest.shape, kept.num_rows, kept.num_classes, states=manifest.states)
        model.load_state_dict(tensors)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BlockDrafterError(f"{path} does not fit {NAME}: {reason}") from None
    return LoadedDrafter(manifest, kept, model.to(device).eval())


def read_weights(
    path: Path, checksum: str, stated_in: str, error: type[BlockDrafterError] = BlockDrafterError
) -> bytes:
    """The bytes of a file of weights.

    Args:
        checksum: its SHA-256.
        stated_in: the file that says so.

    Raises:
        error: it cannot be read, or is damaged; one line.
    """
    try:
        data = path.read_bytes()
    except OSError as failed:
        raise error(f"cannot read {path}: {failed.strerror or failed}") from None
    if hashlib.sha256(data).hexdigest() != checksum:
        raise error(f"{path} is damaged: its checksum is not the one in {stated_in}")
    return data


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that it is there as a whole or as it was before, whatever happens.

    Raises:
        BlockDrafterError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BlockDrafterError(f"cannot write {path}: {error.strerror or error}") from None
