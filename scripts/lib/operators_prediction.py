"""check_operators: OpenAI's `prediction`, by its own client, beside plain SGLang."""

import argparse
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.server import Server
from scripts.lib.spec_bench import spec_bench, tokenizer

TOKENS = 300
# Of 300 tokens so many are others where "95% stay".
CHANGED = 0.05
_TIMED, _QUICK_TIMED = 24, 2
_QUICK_EDITS = 12
_SHORT = 96
_UNRELATED = (
    "def merge(a, b):\n    out = []\n    while a and b:\n        out.append((a if a[0] < b[0] "
    "else b).pop(0))\n    return out + a + b\n\n"
)
# Nothing but the prompt, the answer so far and the prediction drafts.
_ALONE: dict[str, Any] = {"datastore": False, "ingest": False}


@dataclass(frozen=True)
class Answer:
    """A chat completion: its token ids by choice, its usage's details, and what it took."""

    ids: list[list[int]]
    completion_tokens: int
    details: Any
    seconds: float


class Chat:
    """A server's chat completions by OpenAI's client."""

    def __init__(self, server: Server, model: str) -> None:
        import openai

        self._model = model
        self._client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")

    def ask(
        self, text: str, tokens: int, prediction: str | None = None, *, stream=False, n=1, **params
    ) -> Answer:
        """A greedy answer of so many tokens; params: custom_params."""
        asked: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "n": n,
            "extra_body": {"ignore_eos": True, "return_output_ids_in_sglext": True},
        }
        if params:
            asked["extra_body"]["custom_params"] = params
        if prediction is not None:
            asked["prediction"] = {"type": "content", "content": prediction}
        create = self._client.chat.completions.create
        began = time.perf_counter()
        if not stream:
            made = create(**asked)
            seconds = time.perf_counter() - began
            ids, usage = made.model_extra["sglext"]["output_ids"], made.usage
        else:
            events = create(**asked, stream=True, stream_options={"include_usage": True})
            ids, usage = [], None
            for event in events:
                usage = event.usage or usage
                ids = (event.model_extra or {}).get("sglext", {}).get("output_ids", ids)
            seconds = time.perf_counter() - began
        return Answer(ids, usage.completion_tokens, usage.completion_tokens_details, seconds)


def check(options: argparse.Namespace) -> dict[str, float]:
    """prediction_mismatches, usage_errors, prediction_speedup, prediction_unrelated_ratio."""
    edits, timed = (_QUICK_EDITS, _QUICK_TIMED) if options.quick else (options.edits, _TIMED)
    texts = [p.text for p in spec_bench(options.model, max_prompt_tokens=200)]
    with ExitStack() as stack:
        flags = ["--speculative-algorithm", "SSSD"]
        plain = stack.enter_context(Server(options.model, name="plain"))
        ours = stack.enter_context(Server(options.model, flags, name="predicted"))
        chats = Chat(plain, options.model), Chat(ours, options.model)
        words = Words(tokenizer(options.model))
        return compared(*chats, texts, words, edits) | measured(*chats, texts[:timed], words)


class Words:
    """Edits of texts, by a tokenizer that counts what they change."""

    def __init__(self, made: Any) -> None:
        self._tokenizer = made
        self._random = random.Random(0)

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def edited(self, text: str, part: float) -> str:
        """The text with so large a part of its words replaced, left out, or with one put in."""
        words = text.split(" ")
        for _ in range(max(1, round(part * len(words)))):
            at = self._random.randrange(len(words))
            new = self._random.choice(["surely", "Thus,", "x_1", "three"])
            edit = self._random.choice(["replace", "leave out", "put in"])
            words[at : at + (edit != "put in")] = [] if edit == "leave out" else [new]
        return " ".join(words)


def compared(
    plain: Chat, ours: Chat, texts: list[str], words: Words, edits: int
) -> dict[str, float]:
    """Answers with predictions of every kind against plain SGLang's, and their counts.

    Raises:
        NothingShown: no prediction was accepted.
    """
    mismatches = errors = accepted = 0
    for i in tqdm(range(edits), desc="edits", disable=None, leave=False):
        text = texts[i % len(texts)]
        expected = plain.ask(text, _SHORT).ids[0]
        part = (0.0, 0.05, 0.15, 0.4)[i % 4]
        written = words.text(expected)
        prediction = words.edited(written, part) if part else written
        if i % 9 == 8:
            prediction = _UNRELATED
        n = 2 if i % 5 == 4 else 1
        got = ours.ask(text, _SHORT, prediction, stream=i % 2 == 1, n=n, **_ALONE)
        mismatches += got.ids != [expected] * n
        errors += is_wrong(got, n * words.count(prediction))
        accepted += getattr(got.details, "accepted_prediction_tokens", 0) or 0
    if not accepted:
        raise NothingShown("no token of any prediction was accepted")
    return {"edits": edits, "prediction_mismatches": mismatches, "usage_errors": errors}


def is_wrong(answer: Answer, predicted: int) -> bool:
    """Whether an answer's counts are missing or do not add up to the predicted tokens."""
    found = [
        getattr(answer.details, f"{what}_prediction_tokens", None)
        for what in ("accepted", "rejected")
    ]
    counts = [count for count in found if isinstance(count, int) and count >= 0]
    if len(counts) < len(found):
        print(f"no counts of the prediction: {answer.details}", file=sys.stderr)
        return True
    wrong = sum(counts) != predicted or counts[0] > answer.completion_tokens
    if wrong:
        print(f"{counts} of {predicted}, {answer.completion_tokens} written", file=sys.stderr)
    return wrong


def measured(plain: Chat, ours: Chat, texts: list[str], words: Words) -> dict[str, float]:
    """Speedups over plain SGLang; the kinds take turns on each prompt, and at being first."""
    seconds = {"plain": 0.0, "kept": 0.0, "unrelated": 0.0, "none": 0.0}
    kept = predicted = 0
    for i, text in enumerate(tqdm(texts, desc="timed", disable=None, leave=False)):
        written = words.text(plain.ask(text, TOKENS).ids[0])  # and the prompt is in the cache
        ours.ask(text, 1, **_ALONE)
        predictions = {
            "kept": words.edited(written, CHANGED),
            "unrelated": _UNRELATED * 6,
            "none": None,
        }
        kinds = list(seconds)
        for kind in kinds[i % len(kinds) :] + kinds[: i % len(kinds)]:
            if kind == "plain":
                seconds[kind] += plain.ask(text, TOKENS).seconds
                continue
            got = ours.ask(text, TOKENS, predictions[kind], **_ALONE)
            seconds[kind] += got.seconds
            if kind == "kept":
                kept += got.details.accepted_prediction_tokens
                predicted += words.count(predictions[kind] or "")
    return {
        "prediction_kept": kept / predicted,
        "prediction_speedup": seconds["plain"] / seconds["kept"],
        "prediction_unrelated_ratio": seconds["plain"] / seconds["unrelated"],
        "prediction_none_ratio": seconds["plain"] / seconds["none"],
    }
