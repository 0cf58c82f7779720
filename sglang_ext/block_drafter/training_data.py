"""What a block drafter is trained on: prompts and what the target wrote.

A file of `sglang-ext drafter distill`, JSON lines: a header, then an output a line

    {"format": 1, "target": NAME, "tokenizer": FINGERPRINT, "vocab_size": N, ...}
    {"n": 0, "prompt": [ids], "output": [ids], "source": [ids], "namespace": NAME}

`source` (instead of the prompt) and `namespace` may be missing. Or a datastore's served outputs.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from datastores import DEFAULT_NAMESPACE, Datastore, DatastoreError
from datastores.segment import documents_of
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError, SourceRule
from sglang_ext.block_drafter.state_log import folder_of, read_records
from sglang_ext.block_drafter.states_on_disk import StatesAt
from sglang_ext.block_drafter.target_models import TargetModel

FORMAT = 1
# The datastore keeps so many tokens of a prompt before each output (drafters/sssd.py); a unit test
# compares.
DATASTORE_PROMPT_TAIL = 16
# Beyond it a template is no template: prompts that are all the same.
_LONGEST_TEMPLATE = 512

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Example:
    """An output of the target.

    Attributes:
        prompt: int32[p], the whole prompt, or the source itself where `is_source`.
        output: int32[n], with the token that ended it; without one it was cut.
        states: of the target, recorded as it was written; None: they were not.
        held_out: it was named as one that training is judged by.
    """

    prompt: Tokens
    output: Tokens
    is_source: bool = False
    namespace: str = DEFAULT_NAMESPACE
    states: StatesAt | None = None
    held_out: bool = False


@dataclass
class TrainingData:
    """Examples, and what a manifest says of them.

    Attributes:
        origin: where they come from.
        left_out: examples beyond the limit of tokens.
        whole_prompts: False: of the prompts there are only the last tokens.
    """

    origin: str
    examples: list[Example] = field(default_factory=list)
    left_out: int = 0
    whole_prompts: bool = True
    tokens: int = 0

    def add(self, example: Example, most_tokens: int) -> None:
        """Take an example, unless there are too many tokens already or it has no output."""
        size = len(example.prompt) + len(example.output)
        if not len(example.output):
            return
        if self.tokens + size > most_tokens:
            self.left_out += 1
            return
        self.examples.append(example)
        self.tokens += size

    def hold_out(self, others: "TrainingData") -> None:
        """Judge training by these examples, instead of by a part of its own."""
        self.examples += [replace(example, held_out=True) for example in others.examples]
        self.left_out += others.left_out

    def namespaces(self) -> dict[str, int]:
        """Output tokens by namespace."""
        found: dict[str, int] = {}
        for example in self.examples:
            found[example.namespace] = found.get(example.namespace, 0) + len(example.output)
        return found

    def summary(self) -> dict[str, Any]:
        """What the manifest states."""
        return {
            "origin": self.origin,
            "examples": len(self.examples),
            "output_tokens": sum(len(example.output) for example in self.examples),
            "left_out": self.left_out,
            "namespaces": self.namespaces(),
        }

    def digest(self) -> str:
        """Tells whether a training goes on with the data that it began with."""
        found = hashlib.sha256()
        for example in self.examples:
            for tokens in (example.prompt, example.output):
                found.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
            if example.held_out:
                found.update(b"held out")
        return found.hexdigest()[:16]


def header(target: TargetModel) -> dict[str, Any]:
    """The first line of a file, which `read_file` checks."""
    return {
        "format": FORMAT,
        "target": target.name,
        "tokenizer": target.tokenizer,
        "vocab_size": target.vocab_size,
    }


def check_header(path: Path, line: str, target: TargetModel) -> None:
    """Refuse a file that is none of these, or another target's.

    Raises:
        BlockDrafterError: the message names the file.
    """
    try:
        found = json.loads(line)
        is_header = isinstance(found, dict) and found["format"] == FORMAT
        of_target, tokenizer = found["target"], found["tokenizer"]
    except (ValueError, KeyError, TypeError):
        is_header = False
    if not is_header:
        raise BlockDrafterError(
            f"{path} was not written by `sglang-ext drafter distill`: its first line is no header"
        )
    if tokenizer != target.tokenizer:
        raise BlockDrafterError(
            f"{path} holds outputs of {of_target}, whose tokenizer is another ({tokenizer}) than "
            f"{target.name}'s ({target.tokenizer})"
        )


def read_file(path: Path, target: TargetModel, most_tokens: int) -> TrainingData:
    """As `read_files`, of one file."""
    return read_files([path], target, most_tokens)


def read_files(paths: Sequence[Path], target: TargetModel, most_tokens: int) -> TrainingData:
    """What `drafter distill` has written, the first `most_tokens` tokens of it.

    Raises:
        BlockDrafterError: a file cannot be read, is another target's, or none holds anything.
    """
    data = TrainingData(", ".join(path.name for path in paths))
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                _read_into(data, path, file, target, most_tokens)
        except OSError as error:
            raise BlockDrafterError(f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise BlockDrafterError(f"{path} is damaged: it is not UTF-8") from None
    return _not_empty(data)


def _read_into(
    data: TrainingData, path: Path, file: TextIO, target: TargetModel, most_tokens: int
) -> None:
    check_header(path, file.readline(), target)
    records = read_records(folder_of(path))
    places = {} if records is None else records.places
    for number, line in enumerate(file, 2):
        if line.endswith("\n"):  # else it is being written, or was when it was killed
            data.add(_example(path, number, line, target.vocab_size, places), most_tokens)


def read_datastore(
    folder: str, target: TargetModel, most_tokens: int, only: Sequence[str] = ()
) -> TrainingData:
    """The served outputs of a datastore, the newest of each namespace first.

    Beside an output it holds the last tokens of its prompt alone: these are the source.

    Args:
        only: these namespaces' alone; empty: all.

    Raises:
        BlockDrafterError: it cannot be read, is another tokenizer's or holds nothing.
    """
    data = TrainingData(f"datastore {Path(folder).name}", whole_prompts=False)
    try:
        with Datastore.open(
            folder, create=False, read_only=True, tokenizer_fingerprint=target.tokenizer
        ) as store:
            names = [n for n in store.info().namespaces if not only or n in only]
            if missing := sorted(set(only) - set(names)):
                raise BlockDrafterError(f"{folder} has no namespace {missing[0]!r}")
            for name in names:
                share = (most_tokens - data.tokens) // (len(names) - names.index(name))
                before = data.tokens
                for tokens in _newest(store, name):
                    prompt, output = np.split(tokens, [DATASTORE_PROMPT_TAIL])
                    data.add(Example(prompt, output, True, name), before + share)
    except DatastoreError as error:
        raise BlockDrafterError(str(error)) from None
    return _not_empty(data)


def source_rule(data: TrainingData, most_tokens: int) -> SourceRule:
    """What all prompts begin and end with is a template, which says nothing of a source."""
    if not data.whole_prompts:
        return SourceRule(most_tokens=min(most_tokens, DATASTORE_PROMPT_TAIL))
    prompts = [example.prompt for example in data.examples if not example.is_source]
    if len(prompts) < 2:
        return SourceRule(most_tokens=most_tokens)
    shortest = min(map(len, prompts))
    before = shared_tokens(prompts, range(min(shortest, _LONGEST_TEMPLATE)))
    after = shared_tokens(prompts, range(-1, -1 - min(shortest - before, _LONGEST_TEMPLATE), -1))
    first = prompts[0].tolist()
    return SourceRule(tuple(first[:before]), tuple(first[len(first) - after :]), most_tokens)


def source_of(prompt: npt.ArrayLike, rule: SourceRule) -> Tokens:
    """int32[s], the source within a whole prompt."""
    tokens = np.asarray(prompt, dtype=np.int32)
    return tokens[source_span(tokens, rule)]


def source_span(tokens: Tokens, rule: SourceRule) -> slice:
    """Where the source lies within a whole prompt, int32[p]."""
    before, after = len(rule.before), len(rule.after)
    inner = len(tokens) - before - after
    if (
        inner > 0
        and tuple(tokens[:before].tolist()) == rule.before
        and tuple(tokens[before + inner :].tolist()) == rule.after
    ):
        first, end = before, before + inner
    else:
        first, end = 0, len(tokens)
    return slice(max(first, end - rule.most_tokens), end)


def example_source(example: Example, rule: SourceRule) -> Tokens:
    """int32[s], an example's source."""
    return (
        example.prompt[-rule.most_tokens :]
        if example.is_source
        else source_of(example.prompt, rule)
    )


def _example(
    path: Path, number: int, line: str, vocab_size: int, recorded: Mapping[int, StatesAt]
) -> Example:
    """Raises BlockDrafterError: the line is none."""
    try:
        content: Mapping[str, Any] = json.loads(line)
        is_source = content.get("source") is not None
        prompt = _ids(content["source" if is_source else "prompt"], vocab_size)
        output = _ids(content["output"], vocab_size)
        namespace = content.get("namespace") or DEFAULT_NAMESPACE
        if not isinstance(namespace, str):
            raise ValueError("its namespace is no text")
        states = recorded.get(content.get("n", -1))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise BlockDrafterError(f"{path}, line {number} is no example: {what}") from None
    return Example(prompt, output, is_source, namespace, states)


def _ids(values: Any, vocab_size: int) -> Tokens:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError("tokens must be a list of ids")
    tokens = np.array(values, dtype=np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"token ids must be in 0..{vocab_size - 1}")
    return tokens.astype(np.int32)


def _newest(store: Datastore, namespace: str) -> Iterator[Tokens]:
    """int32[n], the documents of a namespace, those of the newest sub-index first."""
    for segment in reversed(store.snapshot(namespace).live):
        documents: Iterable[Any] = reversed(list(documents_of(segment)))
        for document in documents:
            yield document.tokens


def shared_tokens(prompts: Sequence[Sequence[int] | Tokens], places: Iterable[int]) -> int:
    """At how many places, from the first on, all prompts have one token."""
    shared = 0
    for at in places:
        if any(prompt[at] != prompts[0][at] for prompt in prompts):
            break
        shared += 1
    return shared


def _not_empty(data: TrainingData) -> TrainingData:
    if not data.examples:
        raise BlockDrafterError(f"{data.origin} holds no outputs to learn from")
    return data
