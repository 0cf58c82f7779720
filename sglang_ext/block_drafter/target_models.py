"""What a drafter has to know of its target: its name and its tokenizer, without its weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, target_name
from sglang_ext.models import ModelError, resolve
from sglang_ext.models.tokenizers import fingerprint


@dataclass(frozen=True)
class TargetModel:
    """A target.

    Attributes:
        name: as `target_name` gives it.
        tokenizer: fingerprint of its tokenizer.
        vocab_size: tokens are 0 .. vocab_size - 1.
        ends: token ids that end an output.
        layers: how many decoder layers it has.
        encoder: transformers' tokenizer.
    """

    name: str
    tokenizer: str
    vocab_size: int
    ends: tuple[int, ...]
    layers: int
    encoder: Any

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as a server reads it from `/generate`."""
        return list(self.encoder(text)["input_ids"])

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a conversation of this one message, up to where the answer begins.

        Raises:
            BlockDrafterError: the model has no chat template.
        """
        if not getattr(self.encoder, "chat_template", None):
            raise BlockDrafterError(f"{self.name} has no chat template; give --raw")
        message = [{"role": "user", "content": text}]
        rendered = self.encoder.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        return list(self.encoder(rendered, add_special_tokens=False)["input_ids"])


def load_target(model: str) -> TargetModel:
    """The target `model`: a name of `sglang-ext models list`, a path or a hub id.

    Raises:
        BlockDrafterError: there is none, or it has no tokenizer.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        path = resolve(model)
        encoder = AutoTokenizer.from_pretrained(path)
        config = AutoConfig.from_pretrained(path).get_text_config()
    except ModelError as error:
        raise BlockDrafterError(str(error)) from None
    except Exception as error:  # of many kinds: no files, no network, a damaged JSON
        reason = " ".join(str(error).split())[:200]
        raise BlockDrafterError(f"{model}: cannot be loaded as a target: {reason}") from None
    ends = {encoder.eos_token_id, *_listed(config.eos_token_id), *_generation_ends(path)} - {None}
    return TargetModel(
        target_name(path),
        fingerprint(encoder),
        int(config.vocab_size),
        tuple(sorted(end for end in ends if end is not None)),
        int(config.num_hidden_layers),
        encoder,
    )


def layer_to_read(name: str, layers: int, asked: int, option: str) -> int:
    """Behind which of a target's layers its states are read: 0 asks for two thirds of them.

    Args:
        option: that asks, for the message.

    Raises:
        BlockDrafterError: it has no such layer, or it is the last.
    """
    layer = asked or max(1, 2 * layers // 3)
    if not 1 <= layer < layers:
        raise BlockDrafterError(
            f"{option} {layer}: {name} has {layers} layers, expected 1 to {layers - 1}"
        )
    return layer


def _generation_ends(path: str) -> Sequence[int]:
    try:
        content = json.loads((Path(path) / "generation_config.json").read_text(encoding="utf-8"))
        return _listed(content.get("eos_token_id"))
    except (OSError, ValueError, AttributeError):  # a model may have none
        return ()


def _listed(ids: int | Sequence[int] | None) -> Sequence[int]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
