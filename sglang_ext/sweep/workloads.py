"""What a sweep has the methods answer, as token ids through the model's chat template.

Each workload has two parts that share no prompt: `measured`, and `served_before`, the traffic that
a server has seen when it is no longer cold. At most half of a data set is measured.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from sglang_ext.sweep.clips import LONGEST_S, Clip, audio_files, read_clips, read_references
from sglang_ext.sweep.data_files import (
    Question,
    WorkloadError,
    conversations,
    gsm8k,
    sentences,
    spec_bench,
)
from sglang_ext.sweep.item_source import SERVED_TIMES, Source, different
from sglang_ext.sweep.items import Item, Workload
from sglang_ext.sweep.methods import AUDIO, RETRANSLATION, TEXT
from sglang_ext.sweep.scenarios import (
    Passage,
    about,
    agent_steps,
    documents,
    growing,
    passage,
    translate,
)

__all__ = ["WORKLOADS", "Item", "Workload", "WorkloadError", "kind_of", "load_workload"]

# Spec-Bench's name of each part, and MT-Bench's eight categories, which it holds one by one.
MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip
# Of a long document, where the context allows, and where it does not.
LONG_TOKENS = (10_000, 20_000, 30_000)
SHORT_CONTEXT_TOKENS = 6_000
_LEAST_LONG_TOKENS = 2_000
DOCUMENT_QUESTIONS = 8
# For the question and the template around a document.
_TOKENS_AROUND = 160
# Clips besides the measured ones, for the warm-up.
_OTHER_CLIPS = 4
# Words by which a source grows (lag-k), and the update from which results are shown together.
LAG = 3
_LATE_UPDATE = 4


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
        max_tokens: of an output; text is asked for half as many at least, by chance.
        seed: which prompts are chosen.
        context_len: tokens of prompt and output that the server takes.

    Raises:
        WorkloadError: no such workload, or its data is not there, empty or wrong.
    """
    if name not in WORKLOADS:
        raise WorkloadError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    source = Source(name, kind_of(name), tokenizer, data, prompts, max_tokens, seed, context_len)
    workload = WORKLOADS[name](source)
    if not workload.measured:
        raise WorkloadError(
            f"workload {name}: no prompt of {data} fits into {source.room} tokens (the context's "
            f"{context_len} less {max_tokens} for the output)"
        )
    return replace(workload, measured=tuple(_of_any_length(workload.measured, seed)))


def _of_any_length(items: Iterable[Item], seed: int) -> Iterator[Item]:
    """The requests, with half of the most tokens at least, so that they do not end together.

    Equal ones do in plain decoding alone, whose next prompts are then read in one pass.
    """
    for item in items:
        if item.audio or item.stream:  # these end where what they are made from does
            yield item
        else:
            chance = random.Random(f"{seed} {item.id}")
            least = (item.max_tokens + 1) // 2
            yield replace(item, max_tokens=chance.randint(least, item.max_tokens))


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
    measured = list(islice(different(_questions(source, test)), source.prompts))
    served = different(_questions(source, train), but=measured)
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
    behind it is about one of them. No passage is in a measured document and in another one. The
    questions about one document are a group: it is read before the run.
    """
    lengths = [n for n in LONG_TOKENS if n <= source.room - _TOKENS_AROUND]
    lengths = lengths or [min(SHORT_CONTEXT_TOKENS, source.room - _TOKENS_AROUND)]
    if lengths[0] < _LEAST_LONG_TOKENS:
        raise WorkloadError(
            f"workload long: a context of {source.context_len} tokens has room for "
            f"{max(source.room, 0)} of a prompt; documents of {_LEAST_LONG_TOKENS} are the least"
        )
    # Reading documents takes long: one of each length, two at least.
    most = DOCUMENT_QUESTIONS * max(2, len(lengths))
    source = replace(source, prompts=min(source.prompts, most))
    questions = source.shuffled(_of(spec_bench(source.data), ("rag", "summarization")))
    passages = [passage(q, source.count) for q in questions]

    def items(passages: Sequence[Passage]) -> Iterator[Item]:
        for number, document in enumerate(documents(passages, lengths)):
            for place, asked in enumerate(document[:DOCUMENT_QUESTIONS], start=1):
                name = f"document-{number}-{asked.id}"
                messages = [("user", about(document, place))]
                if item := source.item(name, asked.kind, messages):
                    size = round(len(item.input_ids) / 1000)
                    category = f"{asked.kind}, {size}k tokens"
                    yield replace(item, category=category, group=f"document-{number}")

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


def _audio(source: Source) -> Workload:
    """English speech of up to 30 s, transcribed.

    Clips of which it is known what is said come first; what is not measured is for the warm-up.
    """
    files = source.shuffled(audio_files(source.data))
    references = read_references(files[0].parent)
    files.sort(key=lambda path: path.name not in references)
    most = source.context_len // 2  # openai-whisper's limit

    def item(clip: Clip) -> Item:
        length = "0-5 s" if clip.seconds < 5 else "5-10 s" if clip.seconds < 10 else "> 10 s"
        return Item(
            clip.name, length, (), min(source.max_tokens, most),
            audio=clip.url, reference=clip.reference,
        )  # fmt: skip

    clips = islice(read_clips(files, references), source.prompts + _OTHER_CLIPS)
    items = [item(clip) for clip in clips]
    if not items:
        raise WorkloadError(f"{source.data}: no clip is at most {LONGEST_S:g} s long")
    return source.workload(items[: source.prompts], items[source.prompts :])


def _retranslation(source: Source) -> Workload:
    """Live translation, English to French: sentences that grow by three words a step.

    Each step is translated anew. Other sentences, whole, were served before; the first of them
    grows as well, for the warm-up.
    """
    order = source.shuffled(enumerate(dict.fromkeys(sentences(source.data)), start=1))
    found = (made for number, text in order if (made := _updates(source, number, text)))
    measured = min(source.prompts, -(-len(order) // 2))
    taken = list(islice(found, measured + SERVED_TIMES * source.prompts))
    if not taken:
        raise WorkloadError(
            f"{source.data}: no sentence has more than {LAG} words and a prompt of at most "
            f"{source.room} tokens"
        )
    measured = min(measured, -(-len(taken) // 2))
    before = [stream if not i else stream[-1:] for i, stream in enumerate(taken[measured:])]
    return source.workload(list(chain(*taken[:measured])), list(chain(*before)))


def _updates(source: Source, number: int, sentence: str) -> list[Item]:
    """The requests of a sentence that grows; none where it is too short to, or too long."""
    stream, made = f"sentence-{number}", list[Item]()
    for step, text in enumerate(growing(sentence, LAG), start=1):
        name = f"update {step}" if step < _LATE_UPDATE else f"update {_LATE_UPDATE} or later"
        messages = [("user", translate(text))]
        # As translation sessions ask: a model that thinks first would not be live.
        item = source.item(f"{stream}-update-{step}", name, messages, enable_thinking=False)
        if item is None:
            return []
        made.append(replace(item, stream=stream))
    return made if len(made) > 1 else []


WORKLOADS: Mapping[str, Callable[[Source], Workload]] = {
    "mt-bench": _mt_bench,
    "spec-bench": _spec_bench,
    "gsm8k": _gsm8k,
    "long": _long,
    "chat": _chat,
    "agent": _agent,
    "audio": _audio,
    "retranslation": _retranslation,
}
_KINDS: Mapping[str, str] = {"audio": AUDIO, "retranslation": RETRANSLATION}


def kind_of(name: str) -> str:
    """A workload's kind, as methods.TEXT."""
    return _KINDS.get(name, TEXT)


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
