"""What a sweep has the methods answer, as token ids through the model's chat template.

Each workload has two parts that share no prompt: `measured`, and `served_before`, the traffic that
a server has seen when it is no longer cold. At most half of a data set is measured.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sglang_ext.sweep.data_files import (
    Messages,
    Question,
    WorkloadError,
    conversations,
    gsm8k,
    spec_bench,
)
from sglang_ext.sweep.methods import TEXT
from sglang_ext.sweep.scenarios import Passage, about, agent_steps, documents, passage

__all__ = ["WORKLOADS", "Item", "Workload", "WorkloadError", "load_workload"]

# Spec-Bench's name of each part, and MT-Bench's eight categories, which it holds one by one.
MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
# Prompts that were served before, by measured ones.
SERVED_TIMES = 4
# Tokens of the context that are left free, for drafts and what the server adds.
_RESERVED = 64
# Of a long document, where the context allows, and where it does not.
LONG_TOKENS = (10_000, 20_000, 30_000)
SHORT_CONTEXT_TOKENS = 6_000
_LEAST_LONG_TOKENS = 2_000
# Questions about one document follow each other, so that it is read once.
DOCUMENT_QUESTIONS = 8
# For the question and the template around a document.
_TOKENS_AROUND = 160

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Item:
    """One request.

    Attributes:
        id: unique in its workload.
        category: what results are also shown by.
        max_tokens: of its output.
    """

    id: str
    category: str
    input_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Attributes:
        kind: what a method must be able to decode, as methods.TEXT.
        measured: what is timed.
        served_before: never timed; its outputs are the corpus of the methods that have one.
    """

    name: str
    kind: str
    measured: tuple[Item, ...]
    served_before: tuple[Item, ...]


def load_workload(
    name: str,
    tokenizer: Any,
    *,
    data: Path,
    prompts: int,
    max_tokens: int,
    seed: int,
    context_len: int,
) -> Workload:
    """Make a workload: the same one for the same arguments.

    Args:
        tokenizer: the model's, of transformers.
        data: folder of the data sets, or a file.
        prompts: measured ones, at most.
        max_tokens: of an output.
        seed: which prompts are chosen.
        context_len: tokens of prompt and output that the server takes.

    Raises:
        WorkloadError: no such workload, or its data is not there, empty or wrong.
    """
    if name not in WORKLOADS:
        raise WorkloadError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    source = Source(name, tokenizer, data, prompts, max_tokens, seed, context_len)
    workload = WORKLOADS[name](source)
    if not workload.measured:
        raise WorkloadError(
            f"workload {name}: no prompt of {data} fits into {source.room} tokens (the context's "
            f"{context_len} less {max_tokens} for the output)"
        )
    return workload


@dataclass(frozen=True)
class Source:
    """What a workload is made from: load_workload's arguments."""

    name: str
    tokenizer: Any
    data: Path
    prompts: int
    max_tokens: int
    seed: int
    context_len: int

    @property
    def room(self) -> int:
        """Tokens that a prompt may have."""
        return self.context_len - self.max_tokens - _RESERVED

    def shuffled(self, things: Iterable[Thing]) -> list[Thing]:
        """In an order that the seed decides."""
        order = list(things)
        random.Random(f"{self.name} {self.seed}").shuffle(order)
        return order

    def item(self, name: str, category: str, messages: Messages) -> Item | None:
        """A request, unless its prompt is too long."""
        ids = self._ids(messages)
        return Item(name, category, ids, self.max_tokens) if len(ids) <= self.room else None

    def count(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def split(self, items: Iterator[Item], available: int) -> Workload:
        """The first ones are measured, at most half of what is there, the next were served.

        Args:
            available: how many `items` has, or more.
        """
        measured = min(self.prompts, -(-available // 2))
        taken = list(islice(_different(items), measured + SERVED_TIMES * self.prompts))
        measured = min(measured, -(-len(taken) // 2))
        return self.workload(taken[:measured], taken[measured:])

    def halves(
        self,
        things: Sequence[Thing],
        items: Callable[[Sequence[Thing]], Iterator[Item]],
        served_times: int = SERVED_TIMES,
    ) -> Workload:
        """Every other thing makes measured items, the rest those that were served before."""
        measured = list(islice(_different(items(things[::2])), self.prompts))
        served = _different(items(things[1::2]), but=measured)
        return self.workload(measured, list(islice(served, served_times * self.prompts)))

    def workload(self, measured: Sequence[Item], served_before: Sequence[Item]) -> Workload:
        """A text workload."""
        return Workload(self.name, TEXT, tuple(measured), tuple(served_before))

    def _ids(self, messages: Messages) -> tuple[int, ...]:
        if not getattr(self.tokenizer, "chat_template", None):  # a base model
            return tuple(self.tokenizer.encode("\n\n".join(text for _, text in messages)))
        turns = [{"role": role, "content": text} for role, text in messages]
        ids = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )
        return tuple(map(int, ids))


def _mt_bench(source: Source) -> Workload:
    """MT-Bench's first turns. A second turn depends on what the model said in the first."""
    return _in_turns(source, _of(spec_bench(source.data), MT_BENCH))


def _spec_bench(source: Source) -> Workload:
    """All of Spec-Bench, by its six parts."""
    return _in_turns(
        source,
        [
            Question(q.id, "mt-bench" if q.category in MT_BENCH else q.category, q.text)
            for q in spec_bench(source.data)
        ],
    )


def _gsm8k(source: Source) -> Workload:
    """GSM8K: its test set is measured, its training set was served before.

    Without the files, the 80 questions of the test set that are part of Spec-Bench are both.
    """
    test = gsm8k(source.data, "test") or [
        Question(q.id, "gsm8k", q.text) for q in _of(spec_bench(source.data), ("math_reasoning",))
    ]
    train = gsm8k(source.data, "train")
    if not train:
        return _in_turns(source, test)
    measured = list(islice(_different(_questions(source, test)), source.prompts))
    served = _different(_questions(source, train), but=measured)
    return source.workload(measured, list(islice(served, SERVED_TIMES * source.prompts)))


def _chat(source: Source) -> Workload:
    """Conversations of a file, each up to something that the user says, chosen by chance."""
    chats = source.shuffled(enumerate(conversations(source.data)))

    def items() -> Iterator[Item]:
        chosen = random.Random(source.seed)
        for number, messages in chats:
            ends = list(range(1, len(messages) + 1, 2))  # the user has every other turn
            chosen.shuffle(ends)
            for end in ends:
                turn = (end + 1) // 2
                category = f"turn {turn}" if turn < 5 else "turn 5 or later"
                item = source.item(f"chat-{number}-turn-{turn}", category, messages[:end])
                if item:
                    yield item
                    break

    return source.split(items(), len(chats))


def _long(source: Source) -> Workload:
    """Questions about long documents, several about each.

    A document is joined from passages of Spec-Bench's rag and summarization parts; the question
    behind it is about one of them. No passage is in a measured document and in another one.
    """
    lengths = [n for n in LONG_TOKENS if n <= source.room - _TOKENS_AROUND]
    lengths = lengths or [min(SHORT_CONTEXT_TOKENS, source.room - _TOKENS_AROUND)]
    if lengths[0] < _LEAST_LONG_TOKENS:
        raise WorkloadError(
            f"workload long: a context of {source.context_len} tokens has room for "
            f"{max(source.room, 0)} of a prompt; documents of {_LEAST_LONG_TOKENS} are the least"
        )
    questions = source.shuffled(_of(spec_bench(source.data), ("rag", "summarization")))
    passages = [passage(q, source.count) for q in questions]

    def items(passages: Sequence[Passage]) -> Iterator[Item]:
        for number, document in enumerate(documents(passages, lengths)):
            for place, asked in enumerate(document[:DOCUMENT_QUESTIONS], start=1):
                name = f"document-{number}-{asked.id}"
                messages = [("user", about(document, place))]
                if item := source.item(name, asked.kind, messages):
                    size = round(len(item.input_ids) / 1000)
                    yield replace(item, category=f"{asked.kind}, {size}k tokens")

    return source.halves(passages, items, served_times=1)


def _agent(source: Source) -> Workload:
    """An agent's requests: the same tools before each, and a history that grows step by step.

    A task is a rag question of Spec-Bench, and what its searches find are the question's passages.
    The agent's own turns are written here, so that all methods and models get the same requests.
    """

    def items(tasks: Sequence[Question]) -> Iterator[Item]:
        for task in tasks:
            for step, messages in enumerate(agent_steps(task.text), start=1):
                if item := source.item(f"{task.id}-step-{step}", f"step {step}", messages):
                    yield item

    return source.halves(source.shuffled(_of(spec_bench(source.data), ("rag",))), items)


WORKLOADS: Mapping[str, Callable[[Source], Workload]] = {
    "mt-bench": _mt_bench,
    "spec-bench": _spec_bench,
    "gsm8k": _gsm8k,
    "long": _long,
    "chat": _chat,
    "agent": _agent,
}


def _in_turns(source: Source, questions: Sequence[Question]) -> Workload:
    """The categories take turns, so that any first N prompts cover them evenly."""
    by_category: dict[str, list[Question]] = {}
    for question in source.shuffled(questions):
        by_category.setdefault(question.category, []).append(question)
    # In the file's order, whatever the shuffle has made of it.
    left = [by_category[name] for name in dict.fromkeys(q.category for q in questions)]
    order = []
    while left := [category for category in left if category]:
        order += [category.pop(0) for category in left]
    items = (source.item(q.id, q.category, [("user", q.text)]) for q in order)
    return source.split((item for item in items if item), len(order))


def _questions(source: Source, questions: Sequence[Question]) -> Iterator[Item]:
    for q in source.shuffled(questions):
        if item := source.item(q.id, q.category, [("user", q.text)]):
            yield item


def _of(questions: Iterable[Question], categories: Sequence[str]) -> list[Question]:
    return [question for question in questions if question.category in categories]


def _different(items: Iterable[Item], but: Iterable[Item] = ()) -> Iterator[Item]:
    """Each prompt once, and none of `but`."""
    seen = {item.input_ids for item in but}
    for item in items:
        if item.input_ids not in seen:
            seen.add(item.input_ids)
            yield item
