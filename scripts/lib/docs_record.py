"""What came of the docs' commands with the same code: a run that was cut short goes on where it
was, and several runs of some pages each make one."""

import fcntl
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.lib.docs_commands import Command
from scripts.lib.docs_runner import Outcome
from scripts.lib.import_layers import ROOT

_UNREAD = re.compile(r"\.md$|^tests/|^scripts/check_house\.py$|^scripts/lib/(docs|house)_\w+\.py$")


class DocsRecord:
    """Outcomes in a file, a line of JSON each, which several processes may share.

    What failed is not kept: it runs again. Nor is anything of other code.

    Args:
        path: the file, made where there is none; None: outcomes are known to this process alone.
        code: what the outcomes are of, from `code_fingerprint`.
    """

    def __init__(self, path: Path | None, code: str):
        self._path = path
        self._code = code
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

    def page(self, name: str, commands: Sequence[Command]) -> list[Outcome] | None:
        """What came of all commands of a page; None: not all of them have run."""
        for outcomes in self._lines("page", name):
            if [outcome.command for outcome in outcomes] == commands:
                return outcomes
        return None

    def add_page(self, name: str, outcomes: Sequence[Outcome]) -> None:
        """Keep it, if none has failed."""
        if all(outcome.state != "failed" for outcome in outcomes):
            self._write("page", name, outcomes)

    def _lines(self, kind: str, name: str) -> Iterator[list[Outcome]]:
        if self._path is None or not self._path.exists():
            return
        for line in map(json.loads, self._path.read_text().splitlines()):
            if (line["code"], line["kind"], line["name"]) == (self._code, kind, name):
                yield [Outcome(Command(**o.pop("command")), **o) for o in line["outcomes"]]

    def _write(self, kind: str, name: str, outcomes: Sequence[Outcome]) -> None:
        if self._path is None:
            return
        made = {"code": self._code, "kind": kind, "name": name}
        line = json.dumps(made | {"outcomes": [asdict(outcome) for outcome in outcomes]})
        with self._path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line + "\n")


def code_fingerprint() -> str | None:
    """Of what is checked out, as far as the docs' commands read it; None: files differ from it.

    The docs themselves, the tests, and what runs the commands are left out: a page that is mended
    is read again by its commands.
    """

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    if git("status", "--porcelain"):
        return None
    lines = git("ls-tree", "-r", "HEAD").splitlines()
    read = [line for line in lines if not _UNREAD.search(line.partition("\t")[2])]
    return hashlib.sha256("\n".join(read).encode()).hexdigest()
