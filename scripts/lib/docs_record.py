"""What came of the docs' commands on one commit: a run that was cut short goes on where it was, and
several runs of some pages each make one."""

import fcntl
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.lib.docs_commands import Command
from scripts.lib.docs_runner import Outcome
from scripts.lib.import_layers import ROOT


class DocsRecord:
    """Outcomes in a file, a line of JSON each, which several processes may share.

    What failed is not kept: it runs again. Nor is anything of another commit.

    Args:
        path: the file, made where there is none; None: outcomes are known to this process alone.
        commit: what the outcomes are of.
    """

    def __init__(self, path: Path | None, commit: str):
        self._path = path
        self._commit = commit
        self._own: dict[str, Outcome] = {}

    def get(self, text: str) -> Outcome | None:
        """What came of a command that needs nothing of its page."""
        known = self._own.get(text)
        return known or next((o for line in self._lines("command", text) for o in line), None)

    def add(self, text: str, outcome: Outcome) -> None:
        """Keep it."""
        self._own[text] = outcome
        if outcome.state == "ok":
            self._write("command", text, [outcome])

    def page(self, name: str) -> list[Outcome] | None:
        """What came of all commands of a page; None: not all of them have run."""
        return next(self._lines("page", name), None)

    def add_page(self, name: str, outcomes: Sequence[Outcome]) -> None:
        """Keep it, if none has failed."""
        if all(outcome.state != "failed" for outcome in outcomes):
            self._write("page", name, outcomes)

    def _lines(self, kind: str, name: str) -> Iterator[list[Outcome]]:
        if self._path is None or not self._path.exists():
            return
        for line in map(json.loads, self._path.read_text().splitlines()):
            if (line["commit"], line["kind"], line["name"]) == (self._commit, kind, name):
                yield [Outcome(Command(**o.pop("command")), **o) for o in line["outcomes"]]

    def _write(self, kind: str, name: str, outcomes: Sequence[Outcome]) -> None:
        if self._path is None:
            return
        made = {"commit": self._commit, "kind": kind, "name": name}
        line = json.dumps(made | {"outcomes": [asdict(outcome) for outcome in outcomes]})
        with self._path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line + "\n")


def commit() -> str | None:
    """The commit that is checked out; None: files differ from it."""

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    return None if git("status", "--porcelain") else git("rev-parse", "HEAD").strip()
