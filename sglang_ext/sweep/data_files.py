"""The workloads' data: files given by path, read and checked line by line. Nothing is fetched."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

# What the package brings: Spec-Bench, and one recording.
CARRIED = Path(str(resources.files("sglang_ext.sweep") / "data"))
# Names the user's folder of data sets.
DATA_VARIABLE = "SGLANG_EXT_DATA"
_SPEC_BENCH = ("spec_bench.jsonl", "question.jsonl")
_GSM8K_TEST = ("gsm8k_test.jsonl", "gsm8k_test_main.jsonl")
_GSM8K_TRAIN = ("gsm8k_train.jsonl", "gsm8k_train_main.jsonl")
_SENTENCES = ("sentences.txt", "multi30k.test_2016_flickr.en")
_PARALLEL = "parallel"
_CHATS = ("chat.jsonl", "chat.json", "sharegpt.jsonl", "sharegpt.json")
_ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system",
}  # fmt: skip


class WorkloadError(ValueError):
    """A workload that cannot be made; the message names file, line and what was expected."""


@dataclass(frozen=True)
class Question:
    """A prompt of one turn."""

    id: str
    category: str
    text: str


Messages = Sequence[tuple[str, str]]
"""(role, text) by turns, "user" first."""


def own_folder(name: str) -> Path | None:
    """The folder `name` of the user's data sets, which $SGLANG_EXT_DATA holds; None: there is none.

    Raises:
        WorkloadError: the variable names no folder.
    """
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        return None
    if not Path(root).is_dir():
        raise WorkloadError(f"${DATA_VARIABLE} {root}: there is no such folder")
    folder = Path(root).absolute() / name
    return folder if folder.is_dir() else None


def spec_bench(data: Path) -> list[Question]:
    """Spec-Bench's questions, first turns, in the file's order.

    Raises:
        WorkloadError: the file is not there, empty or wrong.
    """
    path = _find(data, _SPEC_BENCH)
    if path is None:
        raise WorkloadError(f"{data}: there is no Spec-Bench in it ({' or '.join(_SPEC_BENCH)})")
    questions: list[Question] = []
    for place, row in _rows(path):
        turns = row.get("turns")
        if not (isinstance(turns, list) and turns and isinstance(turns[0], str)):
            raise WorkloadError(f'{place}: expected "turns", a list of texts')
        if not isinstance(row.get("category"), str):
            raise WorkloadError(f'{place}: expected "category", a text')
        name = str(row.get("question_id", len(questions)))
        questions.append(Question(name, row["category"], turns[0]))
    return questions


def gsm8k(data: Path, part: str) -> list[Question]:
    """GSM8K's questions; none where its file is not there.

    Args:
        part: "test" or "train".

    Raises:
        WorkloadError: the file is empty or wrong.
    """
    path = _find(data, _GSM8K_TEST if part == "test" else _GSM8K_TRAIN)
    if path is None:
        return []
    questions: list[Question] = []
    for place, row in _rows(path):
        if not isinstance(row.get("question"), str):
            raise WorkloadError(f'{place}: expected "question", a text')
        questions.append(Question(f"{part}-{len(questions)}", "gsm8k", row["question"]))
    return questions


def conversations(data: Path) -> list[Messages]:
    """Chats of a file, each as far as user and assistant take turns.

    A chat is {"conversations": [{"from", "value"}, ...]} as in ShareGPT, or {"messages": [{"role",
    "content"}, ...]}, one a line or in one JSON list. What comes from the system goes before what
    the user says first, since not every chat template has a place for it.

    Raises:
        WorkloadError: there is no file, or it is empty or wrong.
    """
    path = data if data.is_file() else _find(data, _CHATS)
    if path is None:
        raise WorkloadError(
            f"{data}: workload chat needs a file of conversations: give it with --data FILE, or "
            f"put {', '.join(_CHATS)} into the folder"
        )
    return [_chat(place, row) for place, row in _rows(path)]


def sentences(data: Path) -> list[str]:
    """The sentences of a text file, plain or .gz, a line each, without empty lines.

    Raises:
        WorkloadError: there is no file, or it is empty or no text.
    """
    given = data.is_file() and ".json" not in data.name
    path = data if given else _find(data, _SENTENCES, beside=_PARALLEL)
    if path is None:
        raise WorkloadError(
            f"{data}: workload retranslation needs English sentences, a line each: give them with "
            f"--data FILE, or put {' or '.join(_SENTENCES)} into the folder"
        )
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            found = [text for line in file if (text := line.strip())]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from None
    if not found:
        raise WorkloadError(f"{path} is empty: expected at least one sentence")
    return found


def _chat(place: str, row: dict[str, Any]) -> Messages:
    turns = row.get("conversations", row.get("conversation", row.get("messages")))
    if not isinstance(turns, list):
        raise WorkloadError(f'{place}: expected "conversations" or "messages", a list')
    system, messages = "", list[tuple[str, str]]()
    for number, turn in enumerate(turns, start=1):
        fields = turn if isinstance(turn, dict) else {}
        said_by, text = fields.get("from", fields.get("role")), fields.get("value")
        text = fields.get("content") if text is None else text
        role = _ROLES.get(said_by) if isinstance(said_by, str) else None
        if not isinstance(text, str):
            raise WorkloadError(
                f'{place}, turn {number}: expected {{"from", "value"}} or {{"role", "content"}}, '
                "texts"
            )
        if role == "system" and not messages:
            system = f"{text}\n\n"
        elif role == ("assistant" if len(messages) % 2 else "user"):
            messages.append((role, text if messages else system + text))
        else:  # tools, or one side twice in a row
            break
    return messages


def _find(data: Path, names: Sequence[str], beside: str = "") -> Path | None:
    """The first of these files, packed or not: beside or in `data`, else in the package.

    Args:
        beside: a folder next to that of `data` to look in as well.
    """
    folder = data if data.is_dir() else data.parent
    places = [folder, folder.parent / beside] if beside else [folder]
    paths = [place / (name + end) for place in (*places, CARRIED) for name in names
             for end in ("", ".gz")]  # fmt: skip
    return next((path for path in paths if path.is_file()), None)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE, line N", object) of JSON lines, or of the entries of a JSON list.

    Raises:
        WorkloadError: the file cannot be read, or holds nothing.
    """
    empty = True
    try:
        for place, row in _entries(path):
            if not isinstance(row, dict):
                raise WorkloadError(f"{place}: expected a JSON object")
            empty = False
            yield place, row
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from None
    if empty:
        raise WorkloadError(f"{path} is empty: expected at least one JSON object")


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        if path.name.removesuffix(".gz").endswith(".json"):
            entries = _parsed(file.read(), str(path))
            for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
                yield f"{path}, entry {number + 1}", entry
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _parsed(line, place)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{place}: not JSON: {error}") from None
