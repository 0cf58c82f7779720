"""Prompts that are composed: long documents, an agent's requests, sources that grow."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.sweep.data_files import Messages, Question

AGENT_STEPS = 4
# A passage's number and the lines around it.
_TOKENS_BY_PASSAGE = 8
_SUMMARIZE = "Summarize:"


@dataclass(frozen=True)
class Passage:
    """A part of a long document.

    Attributes:
        kind: "answer" or "summary", what is asked for.
        question: about this passage; a summary has none.
        tokens: that it takes in a document.
    """

    id: str
    kind: str
    text: str
    question: str
    tokens: int


def passage(question: Question, count: Callable[[str], int]) -> Passage:
    """The passage of a rag or summarization prompt, and what is asked about it.

    Args:
        count: tokens of a text.
    """
    text = question.text.strip()
    if question.category == "summarization":
        text, asked, kind = text.removeprefix(_SUMMARIZE).strip(), "", "summary"
    else:
        (text, _, asked), kind = text.rpartition("\n"), "answer"
    return Passage(question.id, kind, text, asked, count(text) + _TOKENS_BY_PASSAGE)


def documents(passages: Sequence[Passage], lengths: Sequence[int]) -> Iterator[list[Passage]]:
    """Documents of at most these many tokens, by turns; every passage is in one at most.

    What is left in the end makes no document if it would be less than half as long as wanted.
    """
    left, number = list(passages), 0
    while left:
        room = length = lengths[number % len(lengths)]
        chosen, others = list[Passage](), list[Passage]()
        for candidate in left:
            fits = candidate.tokens <= room
            (chosen if fits else others).append(candidate)
            room -= candidate.tokens if fits else 0
        if not chosen or (number and room > length / 2):
            return
        yield chosen
        left, number = others, number + 1


def about(document: Sequence[Passage], place: int) -> str:
    """A prompt: the document, and behind it what is asked about its passage at `place`, from 1."""
    asked = document[place - 1]
    text = "\n\n".join(f"[{i}] {part.text}" for i, part in enumerate(document, start=1))
    if asked.kind == "summary":
        return f"{text}\n\nSummarize passage [{place}] in a few sentences."
    return f"{text}\n\nAnswer from the passages above: {asked.question}"


_TOOLS = (
    ("search", "Search the encyclopedia and return one page of results.", ("query", "page")),
    ("open", "Open a document by its id and return its text.", ("document_id",)),
    ("find", "Find a text in the open document and return its surroundings.", ("text",)),
    ("calculate", "Evaluate an arithmetic expression.", ("expression",)),
    ("note", "Write a line to the notes of this task.", ("line",)),
    ("finish", "Give the answer to the user and end the task.", ("answer", "sources")),
)
_RULES = """Rules:
1. Say in one sentence what you know so far.
2. Then call one tool with a JSON object on a line of its own: {"tool": NAME, "arguments": {...}}.
3. Search until you have what the task needs, then call finish with the answer and its sources.
4. Never answer from memory alone, and quote the words of the source."""


def agent_steps(task: str) -> Iterator[Messages]:
    """The requests of one task: it alone, then with the result of one search more each time.

    Args:
        task: a rag prompt: passages, a line each, and the question.
    """
    text, _, question = task.strip().rpartition("\n")
    messages = [("user", f"{_instructions()}\n\nTask: {question}")]
    yield tuple(messages)
    for page, found in enumerate(text.split("\n")[: AGENT_STEPS - 1], start=1):
        call = {"tool": "search", "arguments": {"query": question, "page": str(page)}}
        known = "I know nothing yet." if page == 1 else f"I have read page {page - 1}."
        messages.append(("assistant", f"{known}\n{json.dumps(call)}"))
        messages.append(("user", f"Result of search, page {page}:\n{found}"))
        yield tuple(messages)


def _instructions() -> str:
    """What is before every task."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string"} for key in keys},
                    "required": list(keys),
                },
            },
        }
        for name, description, keys in _TOOLS
    ]
    return (
        "You are an assistant that solves tasks with tools. The tools are:\n"
        f"{json.dumps(tools, indent=2)}\n\n{_RULES}"
    )


def growing(sentence: str, lag: int, *, by_character: bool = False) -> tuple[str, ...]:
    """A sentence's beginnings, each `lag` words (or characters) longer than the one before.

    The text is cut, not rewritten: spaces and punctuation stay as they are.

    Raises:
        ValueError: the lag is below 1.
    """
    if lag < 1:
        raise ValueError(f"the lag must be at least 1 word, got {lag}")
    ends = [match.end() for match in re.finditer(r"\S" if by_character else r"\S+", sentence)]
    steps = ends[lag - 1 :: lag]
    if ends and (not steps or steps[-1] != ends[-1]):
        steps.append(ends[-1])
    return tuple(sentence[:end].lstrip() for end in steps)


def translate(source: str) -> str:
    """The message of the server's own translation sessions."""
    from sglang_ext.api.translation.translator import DEFAULT_TEMPLATE

    return DEFAULT_TEMPLATE.format(
        source=source, source_language="English", target_language="French"
    )
