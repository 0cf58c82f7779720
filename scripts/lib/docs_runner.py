"""Runs the commands of a page of the docs as a reader would, in a folder and a home of its own."""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from scripts.lib.docs_commands import Command, Kind, Plan, assigned, plan
from scripts.lib.import_layers import ROOT
from sglang_ext.servers import processes
from sglang_ext.servers.server_process import ServerError, ServerProcess
from sglang_ext.sweep.data_files import CARRIED

MODEL = "smollm2-135m-instruct"
# Words in capitals that pages have their readers replace.
PLACEHOLDERS = {
    "MODEL": MODEL, "FILE": "figures.json", "DIR": "out", "VERSION": version("sglang")
}  # fmt: skip
_DATA = ROOT / "scripts" / "data"
_DISTURBED = 3
_COMMAND_S = 1800
# Below what other programs on the machine leave; the pages' own flags come first.
_SMALL_POOL = ["--max-total-tokens", "8192"]
_PORT = re.compile(r"\b3000[01]\b")
# Needs nothing that its page has made, and leaves nothing that another reads.
_ALONE = re.compile(r"python -m scripts\.\w+( --quick| --parts [\w,]+| --docs docs)*")


@dataclass(frozen=True)
class Outcome:
    """What came of a command: `ok`, `failed` or `skipped`, and why."""

    command: Command
    state: str
    detail: str = ""
    seconds: float = 0.0


class Ran(Protocol):
    """Knows what came of commands that need nothing of their page."""

    def get(self, text: str) -> Outcome | None:
        """What came of one; None: it has not been run."""

    def add(self, text: str, outcome: Outcome) -> None:
        """Keep it."""


class DocsRunner:
    """A folder to run one page's commands in, with the servers that they need, one a port.

    Args:
        work: an empty folder.
        commands: the page's commands.
        has_gpu: whether this machine has a CUDA device.
        ran: what came of checks and benchmarks on other pages, which are not run twice; those
            of this page are added.
    """

    def __init__(
        self,
        work: Path,
        commands: Sequence[Command],
        has_gpu: bool = False,
        ran: Ran | None = None,
    ):
        self._ran = ran
        self._work = work
        self._commands = commands
        self._plans = [plan(command, has_gpu) for command in commands]
        self._ports = {shown: str(processes.free_port()) for shown in ("30000", "30001")}
        self._servers: dict[str, ServerProcess] = {}
        self._failed: set[int] = set()  # numbers of servers that did not start
        self._variables = work / "variables.sh"
        self._set_up()

    def outcomes(self) -> Iterator[Outcome]:
        """Run the commands one after the other; servers end behind the last one."""
        try:
            for number, (command, planned) in enumerate(
                zip(self._commands, self._plans, strict=True)
            ):
                if planned.kind is Kind.SKIP:
                    yield Outcome(command, "skipped", planned.text)
                    continue
                if missing := self._missing(number):
                    yield Outcome(command, "skipped", f"needs {missing} of a command not run here")
                    continue
                alone = self._ran if is_alone(planned) else None
                if alone and (before := alone.get(planned.text)):
                    where = f"as {before.command.page}:{before.command.line}"
                    yield Outcome(command, before.state, where)
                    continue
                begun = time.monotonic()
                detail = self._serve(number) if planned.kind is Kind.SERVE else self._run(number)
                state = "failed" if detail else "ok"
                outcome = Outcome(command, state, detail, time.monotonic() - begun)
                if alone:
                    for text in {planned.text, planned.text.replace(" --docs docs", "")}:
                        alone.add(text, outcome)
                yield outcome
        finally:
            self._stop_servers()

    def _set_up(self) -> None:
        """The files that pages speak of, and a home with the machine's caches."""
        home = self._work / "home"
        project = home / "src" / "project"
        project.mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "demo.py", project)
        (home / ".cache").symlink_to(Path.home() / ".cache")
        (home / ".curlrc").write_text("fail-with-body\nshow-error\n")
        (self._work / ".venv").symlink_to(ROOT / ".venv")
        (self._work / "docs").mkdir()
        self._variables.touch()
        _write_corpora(self._work)
        _install_drafter(self._work / "site")
        shown = "\n".join(command.text for command in self._commands)
        if "talk." in shown or "*.mp3" in shown:
            _write_audio(self._work)
        if "served_before.jsonl" in shown:
            _write_served(self._work / "results")

    def _run(self, number: int) -> str:
        """Run a command; returns what went wrong, "" if nothing did."""
        text = self._plans[number].text
        filled = self._with_variables(text)
        ports = {shown for shown, here in self._ports.items() if shown in filled or here in filled}
        if not ports:
            self._stop_servers()
        for port in sorted(ports - set(self._servers)):
            server = self._server_of(port, number)
            if server is None:
                return f"{self._commands[number].page} shows no server on port {port}"
            if wrong := self._serve(server):
                return wrong
        return self._shell(self._filled(text))

    def _missing(self, number: int) -> str | None:
        """What a command of before would have made that was skipped, and this one reads."""
        words = self._commands[number].text.split()
        before = zip(self._commands[:number], self._plans[:number], strict=True)
        for text in (command.text for command, planned in before if planned.kind is Kind.SKIP):
            made = re.search(r"--(?:out|into) (\S+)", text)
            if made and made[1] in words and not (self._work / made[1]).exists():
                return made[1]
        return None

    def _with_variables(self, text: str) -> str:
        """The command, and what the variables are that it uses."""
        known = self._variables.read_text().splitlines()
        used = [line for line in known if any(f"${name}" in text for name in assigned_names(line))]
        return "\n".join([text, *used])

    def _server_of(self, port: str, number: int) -> int | None:
        """Which of the page's servers on a port a command is for: the last one shown before it.

        Where there is none, the first one behind it; None: the page shows none.
        """
        servers = [
            n
            for n, planned in enumerate(self._plans)
            if planned.kind is Kind.SERVE and _port_of(planned.text) == port
        ]
        before = [n for n in servers if n < number]
        return max(before) if before else next(iter(servers), None)

    def _serve(self, number: int) -> str:
        """Start a server and wait until it answers; returns what went wrong, "" if nothing did."""
        if number in self._failed:
            return f"the server of line {self._commands[number].line} did not start"
        text = self._plans[number].text
        port = _port_of(text)
        if (old := self._servers.pop(port, None)) is not None:
            old.stop()
        words = shlex.split(self._filled(text), comments=True)
        words += [] if "--port" in words else ["--port", self._ports[port]]
        server = ServerProcess(
            f"the server on port {port}",
            [str(ROOT / ".venv" / "bin" / words[0]), *words[1:], *_SMALL_POOL],
            f"http://127.0.0.1:{self._ports[port]}",
            self._work / f"server-{port}.log",
            env=self._environment(),
        )
        try:
            self._servers[port] = server.start().wait()
        except ServerError as error:
            self._failed.add(number)
            return str(error)
        return ""

    def _shell(self, text: str) -> str:
        """Run a line of shell with the variables of those before it."""
        names = " ".join(assigned(text))
        keep = f"\nrc=$?\ndeclare -p {names} >> {self._variables}\nexit $rc" if names else ""
        script = f"set -o pipefail\n. {self._variables}\n{text}{keep}\n"
        log = self._work / "command.log"
        with log.open("wb") as out:
            process = processes.start(
                ["/bin/bash", "-c", f"cd {shlex.quote(str(self._work))}\n{script}"],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(),
            )
        try:
            code = process.wait(_COMMAND_S)
        except subprocess.TimeoutExpired:
            return f"did not end within {_COMMAND_S} s:\n{_tail(log)}"
        finally:
            processes.stop_group(process)
        # A sweep on a machine that others use ends so, and has measured all the same.
        fine = (0, _DISTURBED) if text.startswith("sglang-ext sweep") else (0,)
        return "" if code in fine else f"exit code {code}:\n{_tail(log)}"

    def _filled(self, text: str) -> str:
        """A command with what its reader would fill in, and ports that are free here."""
        for word, value in PLACEHOLDERS.items():
            text = re.sub(rf"\b{word}\b", value, text)
        text = re.sub(r"^make\b", f"make -C {ROOT} -o .venv/.installed", text)
        text = text.replace("~/", f"{self._work}/home/").replace(" ./", f" {self._work}/")
        return _PORT.sub(lambda found: self._ports[found[0]], text)

    def _environment(self) -> dict[str, str]:
        path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        python = f"{ROOT}:{self._work / 'site'}"
        return os.environ | {
            "HOME": str(self._work / "home"), "PATH": path, "PYTHONPATH": python,
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def _stop_servers(self) -> None:
        while self._servers:
            self._servers.popitem()[1].stop()


def is_alone(planned: Plan) -> bool:
    """Whether what came of a command is known by itself, whatever page shows it."""
    return planned.kind is not Kind.SKIP and bool(_ALONE.fullmatch(planned.text))


def assigned_names(declaration: str) -> list[str]:
    """The variable that a line of `declare -p` is of."""
    return re.findall(r"^declare -\S+ (\w+)=", declaration)


def _port_of(server: str) -> str:
    port = re.search(r"--port (\d+)", server)
    return port[1] if port else "30000"


def _write_audio(work: Path) -> None:
    """Recordings under the names that the pages give them; in a process, which loads torch."""
    paths = [CARRIED / "LJ001-0001.flac", work / "talk.mp3", work / "talk.wav"]
    command = [sys.executable, "-c", _ENCODE, *map(str, paths)]
    subprocess.run(command, cwd=ROOT, check=True)


_ENCODE = """
import sys
from pathlib import Path
from scripts.speech_data import encode, read_audio
clip = read_audio(Path(sys.argv[1]))
for path in map(Path, sys.argv[2:]):
    path.write_bytes(encode(clip, path.suffix[1:]))
"""


def _write_corpora(work: Path) -> None:
    """Texts and chats under the names that the pages give them."""
    shutil.copy(_DATA / "gsm8k.jsonl.gz", work / "gsm8k_train.jsonl.gz")
    with gzip.open(_DATA / "gsm8k.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(50), strict=False)]
    answers = [json.dumps({"text": row["answer"]}) for row in rows]
    (work / "answers.jsonl").write_text("\n".join(answers) + "\n")
    chats = [json.dumps({"messages": [{"role": "user", "content": r["question"]}]}) for r in rows]
    (work / "chats.jsonl").write_text("\n".join(chats) + "\n")
    sentences = [row["question"].partition(". ")[0] for row in rows]
    (work / "sentences.txt").write_text("\n".join(sentences) + "\n")


def _write_served(results: Path) -> None:
    """The file that a sweep leaves in its folder: prompts and outputs, as token ids."""
    results.mkdir()
    with gzip.open(_DATA / "answers.jsonl.gz", "rt") as lines:
        ids = [json.loads(line) for line, _ in zip(lines, range(20), strict=False)]
    served = [json.dumps({"prompt": line[:16], "output": line[16:80]}) for line in ids]
    (results / "served_before.jsonl").write_text("\n".join(served) + "\n")


def _install_drafter(site: Path) -> None:
    """The drafter of docs/drafters.md as an installed package."""
    page = (ROOT / "docs" / "drafters.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (points,) = re.findall(r"```toml\n\[project.entry-points.\"(.*?)\"\]\n(.*?)```", page, re.S)
    info = site / "my_package-1.dist-info"
    info.mkdir(parents=True)
    (site / "my_package.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    shown = points[1].replace('"', "")
    (info / "entry_points.txt").write_text(f"[{points[0]}]\n{shown}")


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
