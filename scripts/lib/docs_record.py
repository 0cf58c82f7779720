"""What came of the docs' commands with the same code: a run that was cut short goes on where it
was, and several runs of some pages each make one."""

import fcntl
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.lib.docs_commands import Command, Kind, plan
from scripts.lib.docs_runner import Outcome, is_alone


class DocsRecord:
    """Outcomes in a file, a line of JSON each, which several processes may share.

    What failed is not kept: it runs again. Nor is anything of other code.

    Args:
        path: the file, made where there is none; None: outcomes are known to this process alone.
        code: a text of commands -> the fingerprint of the code that they run.
    """

    def __init__(self, path: Path | None, code: Callable[[str], str]):
        self._path = path
        self._code = code
        self._own: dict[str, Outcome] = {}

    def get(self, text: str) -> Outcome | None:
        """What came of a command that needs nothing of its page."""
        known = self._own.get(text)
        lines = self._lines("command", text, text)
        return known or next((o for line in lines for o in line), None)

    def add(self, text: str, outcome: Outcome) -> None:
        """Keep it."""
        self._own[text] = outcome
        if outcome.state == "ok":
            self._write("command", text, text, [outcome])

    def page(self, name: str, commands: Sequence[Command]) -> list[Outcome] | None:
        """What came of all commands of a page; None: not all of them have run.

        Those that are known by themselves are looked up so; what these run, and those that are
        skipped, is no code of the page's.
        """
        alone = [self.get(planned.text) for planned in map(plan, commands) if is_alone(planned)]
        if all(known is not None and known.state == "ok" for known in alone):
            for outcomes in self._lines("page", name, _text(commands)):
                if [outcome.command for outcome in outcomes] == commands:
                    return outcomes
        return None

    def add_page(self, name: str, outcomes: Sequence[Outcome]) -> None:
        """Keep it, if none has failed."""
        if all(outcome.state != "failed" for outcome in outcomes):
            text = _text([outcome.command for outcome in outcomes])
            self._write("page", name, text, outcomes)

    def _lines(self, kind: str, name: str, text: str) -> Iterator[list[Outcome]]:
        if self._path is None or not self._path.exists():
            return
        wanted = (self._code(text), kind, name)
        for line in map(json.loads, self._path.read_text().splitlines()):
            if (line["code"], line["kind"], line["name"]) == wanted:
                yield [Outcome(Command(**o.pop("command")), **o) for o in line["outcomes"]]

    def _write(self, kind: str, name: str, text: str, outcomes: Sequence[Outcome]) -> None:
        if self._path is None:
            return
        made = {"code": self._code(text), "kind": kind, "name": name}
        line = json.dumps(made | {"outcomes": [asdict(outcome) for outcome in outcomes]})
        with self._path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line + "\n")


def _text(commands: Sequence[Command]) -> str:
    """Those that run because of their page."""
    planned = ((command.text, plan(command)) for command in commands)
    return "\n".join(t for t, p in planned if p.kind is not Kind.SKIP and not is_alone(p))
