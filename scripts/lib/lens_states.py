"""Texts, and a model's states at its exits and its end, without a server (transformers, fp32)."""

import functools
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scripts.lib.spec_bench import DATA, tokenizer
from sglang_ext.mirror.target_parts import TargetParts, parts_of, tap_normed, tap_state
from sglang_ext.models import resolve


@dataclass(frozen=True)
class Model:
    """A causal language model as transformers has it, and its parts."""

    model: Any
    parts: TargetParts

    @property
    def depth(self) -> int:
        return len(self.parts.layers)


def load(name: str) -> Model:
    """A model by its name, path or hub id, in float32."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(resolve(name), dtype=torch.float32).eval()
    config = made.config
    return Model(made, parts_of(made, config.num_hidden_layers, config.vocab_size))


def gsm8k_texts(model: str) -> list[list[int]]:
    """Questions with worked answers, in the model's chat template."""
    texts = []
    with gzip.open(DATA / "gsm8k.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            chat = [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
            texts.append(tokenizer(model).apply_chat_template(chat, return_dict=False))
    return texts


def up_to(texts: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    """The first texts, of about so many tokens in all."""
    taken: list[Sequence[int]] = []
    for text in texts:
        if sum(map(len, taken)) >= tokens:
            break
        taken.append(text)
    return taken


@torch.inference_mode()
def states_of(
    model: Model, texts: Sequence[Sequence[int]], exits: Sequence[int]
) -> Iterator[tuple[dict[int, torch.Tensor], torch.Tensor]]:
    """For each text the states at each exit, float[n, d], and the final normalised ones."""
    seen: dict[int, torch.Tensor] = {}
    ends = [
        tap_state(model.parts.layers, at, functools.partial(seen.__setitem__, at)) for at in exits
    ]
    ends.append(tap_normed(model.parts.norm, functools.partial(seen.__setitem__, -1)))
    try:
        for text in texts:
            model.model.model(torch.tensor([list(text)]))
            # The norm is applied to states at exits by whoever gets these: taken before that.
            final = seen[-1][0]
            yield {at: seen[at].reshape(len(text), -1) for at in exits}, final
    finally:
        for end in ends:
            end()
