"""What bench_mirror has measured, in a folder: a run that was ended, or split, goes on there.

settings.json  what all parts agree in
PART.jsonl     answers, one a line, as they come
PART.done      the part's own figures, once it is complete
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from scripts.lib.mirror_runs import Answer, Settings

_SETTINGS = "settings.json"


class ResultFolder:
    """A folder of results; made if it is not there.

    Raises:
        ValueError: it has results of other settings; the message names the first that differs.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _SETTINGS
        mine = asdict(settings)
        if path.exists():
            theirs = json.loads(path.read_text())
            for name in mine:
                if mine[name] != theirs.get(name):
                    raise ValueError(
                        f"{folder} has results with {name} {theirs.get(name)!r}, not "
                        f"{mine[name]!r}: name another --folder"
                    )
        else:
            path.write_text(json.dumps(mine, indent=1) + "\n")

    def part(self, name: str) -> "PartResults":
        """What there is of a part."""
        return PartResults(self._folder / name)

    def answers(self) -> list[Answer]:
        """Of all parts, complete or not."""
        names = sorted(path.stem for path in self._folder.glob("*.jsonl"))
        return [answer for name in names for answer in self.part(name).answers]

    def figures(self) -> dict[str, float]:
        """Of all complete parts; those that several parts have are added up."""
        total: dict[str, float] = {}
        for path in sorted(self._folder.glob("*.done")):
            for name, value in json.loads(path.read_text()).items():
                total[name] = total.get(name, 0) + value
        return total


class PartResults:
    """A part's answers and figures; `path` without an ending."""

    def __init__(self, path: Path) -> None:
        self._lines = path.with_name(path.name + ".jsonl")
        self._done = path.with_name(path.name + ".done")
        self.answers: list[Answer] = []
        if self._lines.exists():
            text = self._lines.read_text()
            whole = text[: text.rfind("\n") + 1]  # a kill may have torn the last line
            if whole != text:
                self._lines.write_text(whole)
            self.answers = [_answer(line) for line in whole.splitlines()]

    @property
    def complete(self) -> bool:
        """Whether nothing of it is left to be done."""
        return self._done.exists()

    def has(self, row: str, task: str, prompt: int, batch: int, temperature: float) -> bool:
        """Whether this was answered."""
        key = (row, task, prompt, batch, temperature)
        return any(key == (a.row, a.task, a.prompt, a.batch, a.temperature) for a in self.answers)

    def add(self, *answers: Answer) -> None:
        """Keep answers."""
        with self._lines.open("a") as file:
            for answer in answers:
                file.write(json.dumps(asdict(answer)) + "\n")
        self.answers += answers

    def finish(self, figures: Mapping[str, float]) -> None:
        """It is complete."""
        self._done.write_text(json.dumps(dict(figures), indent=1) + "\n")


def _answer(line: str) -> Answer:
    content = json.loads(line)
    return Answer(**{**content, "token_ids": tuple(content["token_ids"])})
