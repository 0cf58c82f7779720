"""The manifest of a drafter's directory: what was trained, for which target, and how good it is.

A directory holds drafter.json (this) and model.safetensors (`drafter_files`). Read without torch.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.block_drafter.shapes import Shape, TargetStates

NAME = "drafter.json"
# 1 and 2 read a window of tokens, or states of the source alone; 3 chose each place's token apart.
FORMAT = 4
KIND = "block"
_MAX_BYTES = 1 << 24


class BlockDrafterError(ValueError):
    """A drafter, its data or its training is not usable; the message says why, in one line."""


@dataclass(frozen=True)
class SourceRule:
    """What of a prompt is a request's source, the same in training and in serving.

    Attributes:
        before, after: tokens that all prompts of the data began and ended with, a template; they
            are left out of a prompt that has both.
        most_tokens: of what is left the last ones.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    most_tokens: int = 256


@dataclass(frozen=True)
class Manifest:
    """What drafter.json states.

    Attributes:
        target: name of the model that it drafts for (`target_name`).
        tokenizer: fingerprint of the target's tokenizer.
        vocab_size: of the target.
        ends: token ids that end an output.
        shape: of the model; `shape.block` is SpecDec's k.
        source: what of a prompt it reads.
        outputs: how many of the kept tokens can be drafted.
        weights: SHA-256 of model.safetensors.
        data: what it was trained on: examples, tokens, and output tokens by namespace.
        training: how.
        scores: accepted tokens a step on held-out outputs, by k.
        states: of the target, which it reads in place of an encoder of its own; None: it has one.
    """

    target: str
    tokenizer: str
    vocab_size: int
    ends: tuple[int, ...]
    shape: Shape
    source: SourceRule
    outputs: int
    weights: str
    data: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    states: TargetStates | None = None

    @property
    def namespaces(self) -> Mapping[str, int]:
        """Output tokens that it was trained on, by namespace."""
        return self.data.get("namespaces", {})

    def as_json(self) -> str:
        """What drafter.json holds."""
        stated = asdict(self)
        if self.states is None:
            del stated["states"]
        return json.dumps({"format": FORMAT, "kind": KIND, **stated}, indent=1) + "\n"


def is_drafter_folder(folder: str | Path) -> bool:
    """Whether a folder says that it is a drafter's."""
    return (Path(folder) / NAME).is_file()


def read_manifest(folder: str | Path) -> Manifest:
    """What a drafter's directory states.

    Raises:
        BlockDrafterError: there is no such directory, or its manifest is damaged or of another
            format; the message names the file.
    """
    path = Path(folder) / NAME
    content = read_json(path, f"{folder} is no drafter's directory: it has no {NAME}")
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise BlockDrafterError(f"{path} is damaged: {what}") from None


def read_json(path: Path, missing: str, error: type[BlockDrafterError] = BlockDrafterError) -> Any:
    """What a manifest's file holds.

    Args:
        missing: what is wrong where there is none.

    Raises:
        error: it is not there, cannot be read, is too large or is no JSON; one line.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise error(f"{path} is damaged: it is too large for a manifest")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(missing) from None
    except OSError as failed:
        raise error(f"cannot read {path}: {failed.strerror or failed}") from None
    except (ValueError, RecursionError):
        raise error(f"{path} is damaged: it is not JSON") from None


def target_name(model_path: str) -> str:
    """A model's name, wherever it lies: the last part of its path or hub id."""
    return Path(model_path.rstrip("/")).name


def check_target(folder: str | Path, manifest: Manifest, target: str, tokenizer: str) -> None:
    """Refuse another target's drafter.

    Args:
        target: name of the served model; "" where it is not known.
        tokenizer: fingerprint of its tokenizer; "" where it is not known.

    Raises:
        BlockDrafterError: the message names both targets.
    """
    if tokenizer and tokenizer != manifest.tokenizer:
        raise BlockDrafterError(
            f"drafter {folder} was trained for {manifest.target}, whose tokenizer is another "
            f"({manifest.tokenizer}) than {target or 'this target'}'s ({tokenizer})"
        )
    if target and target != manifest.target:
        raise BlockDrafterError(
            f"drafter {folder} was trained for {manifest.target}, not for {target}; where these "
            f"are one model under two names, write {target} as target in {NAME}"
        )


def _parse(content: Any) -> Manifest:
    """Raises KeyError, TypeError, ValueError: it is no manifest."""
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"format {content.get('format')!r}, and this version reads {FORMAT}: train it again"
        )
    if content.get("kind") != KIND:
        raise ValueError(f"kind {content.get('kind')!r}, expected {KIND}")
    texts = {name: _of(content, name, str) for name in ("target", "tokenizer", "weights")}
    if not re.fullmatch(r"[0-9a-f]{64}", texts["weights"]):
        raise ValueError("weights must be a SHA-256")
    source = _of(content, "source", dict)
    return Manifest(
        **texts,
        vocab_size=_count(content, "vocab_size"),
        outputs=_count(content, "outputs"),
        ends=_ids(content, "ends"),
        shape=Shape.of(_of(content, "shape", dict)),
        states=TargetStates.of(content.get("states")),
        source=SourceRule(
            _ids(source, "before"), _ids(source, "after"), _count(source, "most_tokens")
        ),
        **{name: _of(content, name, dict) for name in ("data", "training", "scores")},
    )


def _of(content: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(content[name], kind):
        raise ValueError(f"{name} must be a {kind.__name__}")
    return content[name]


def _count(content: Mapping[str, Any], name: str) -> int:
    value = content[name]
    if type(value) is not int or not 1 <= value <= 1 << 30:
        raise ValueError(f"{name} must be a whole number from 1")
    return value


def _ids(content: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = _of(content, name, list)
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{name} must be token ids")
    return tuple(values)
