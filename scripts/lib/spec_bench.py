"""Prompts of Spec-Bench as token ids, through the model's own chat template."""

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_ext.sweep.data_files import CARRIED

DATA = Path(__file__).parents[1] / "data"  # of checks and benchmarks alone
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Prompt:
    """One Spec-Bench question, first turn."""

    category: str
    text: str
    input_ids: tuple[int, ...]


@cache
def tokenizer(model: str) -> Any:
    """The tokenizer of a model path or name."""
    from transformers import AutoTokenizer

    from sglang_ext.models import resolve

    return AutoTokenizer.from_pretrained(resolve(model))


def spec_bench(model: str = MODEL, *, max_prompt_tokens: int = 1024) -> list[Prompt]:
    """All prompts of at most `max_prompt_tokens`, the categories taking turns.

    Any first N of them then cover the categories evenly, and the first N and the rest are of
    the same categories.
    """
    by_category: dict[str, list[Prompt]] = {}
    with gzip.open(CARRIED / "spec_bench.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            question = json.loads(line)
            text = question["turns"][0]
            ids = tokenizer(model).apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            if len(ids) <= max_prompt_tokens:
                prompt = Prompt(question["category"], text, tuple(ids))
                by_category.setdefault(prompt.category, []).append(prompt)
    order = []
    while by_category:
        for category in list(by_category):
            order.append(by_category[category].pop(0))
            if not by_category[category]:
                del by_category[category]
    return order


def unseen_texts() -> set[str]:
    """Questions that no lens is fitted on: those with an odd place (mirror/fit_texts.py)."""
    with gzip.open(CARRIED / "spec_bench.jsonl.gz", "rt", encoding="utf-8") as lines:
        return {json.loads(line)["turns"][0] for place, line in enumerate(lines) if place % 2}
