"""Bad input of SpecDec's commands and requests: each must be one clear line, and end nothing.

A full disk is played by a limit on the size of files (`ulimit -f`): writes fail as they do there.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.lib.client import generate
from scripts.lib.http_client import HTTP
from sglang_ext.block_drafter.drafter_files import WEIGHTS
from sglang_ext.block_drafter.drafter_manifest import NAME
from sglang_ext.servers.processes import free_port

CLI = [sys.executable, "-m", "sglang_ext.cli"]
_TIMEOUT_S = 300
# Of a line that tells what to do; longer ones are a dump.
_LONGEST = 400
_KIB_OF_A_FULL_DISK = 64


@dataclass(frozen=True)
class Case:
    """A mistake and what came of it.

    Attributes:
        name: of the mistake.
        said: what was said of it.
        fault: why that is not one clear line; empty: it is.
    """

    name: str
    said: str
    fault: str


def cases(
    url: str, prompt: Sequence[int], folder: Path, drafter: Path, data: Path, model: str
) -> Iterator[Case]:
    """Make every mistake.

    Args:
        url: a server of ours.
        prompt: token ids that it may be asked.
        folder: to write to.
        drafter: a drafter's directory for `model`.
        data: what it was trained on.
        model: the target.
    """
    rules: list[tuple[str, dict[str, Any], str]] = [
        ("beta 0", {"top_beta": 0}, "relaxed.top_beta"),
        ("negative tau", {"tau": -1.0}, "relaxed.tau"),
    ]
    for name, rule, word in rules:
        yield _request(name, url, prompt, rule, word)
    other = _copy(drafter, folder / "other")
    stated = json.loads((other / NAME).read_text())
    (other / NAME).write_text(json.dumps(stated | {"target": "another-model"}))
    yield _command("wrong target", _serve(model, other), "another-model")
    damaged = _copy(drafter, folder / "damaged")
    (damaged / NAME).write_text((damaged / NAME).read_text()[:-20])
    yield _command("damaged manifest", _serve(model, damaged), "damaged")
    torn = _copy(drafter, folder / "torn")
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:-1000])
    yield _command(
        "damaged weights", ["drafter", "eval", str(torn), *_data(data, model)], "damaged"
    )
    empty = folder / "empty.jsonl"
    empty.write_text(data.read_text().splitlines()[0] + "\n")
    train = ["drafter", "train", "--shape", "tiny", "--steps", "5", "--out"]
    yield _command(
        "empty training data", [*train, str(folder / "a"), *_data(empty, model)], "no outputs"
    )
    full = [*train, str(folder / "b"), *_data(data, model)]
    yield _command("disk full while training", full, "cannot write", full_disk=True)
    yield _alive(url, prompt)


def _data(data: Path, model: str) -> list[str]:
    return ["--data", str(data), "--model", model]


def _serve(model: str, drafter: Path) -> list[str]:
    asked = ["serve", "--model", model, "--port", str(free_port())]
    return [*asked, "--speculative-algorithm", "SSSD", "--draft-model", str(drafter)]


def _copy(drafter: Path, to: Path) -> Path:
    return Path(shutil.copytree(drafter, to))


def _request(name: str, url: str, prompt: Sequence[int], rule: Any, word: str) -> Case:
    sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": {"relaxed": rule}}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    answer = HTTP.post(url + "/generate", json=body, timeout=_TIMEOUT_S)
    said = answer.text.strip()
    if answer.status_code != 400:
        return Case(name, said, f"status {answer.status_code}, expected 400")
    return Case(name, said, _fault([said], word))


def _command(name: str, argv: Sequence[str], word: str, full_disk: bool = False) -> Case:
    command = [*CLI, *argv]
    if full_disk:
        limit = f'ulimit -f {_KIB_OF_A_FULL_DISK}; exec "$@"'
        command = ["bash", "-c", limit, "bash", *command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    said = [line for line in done.stderr.splitlines() if "error: " in line]
    if done.returncode == 0:
        return Case(name, " ".join(said), "the command ended well")
    return Case(name, " ".join(said) or done.stderr[-300:], _fault(said, word))


def _alive(url: str, prompt: Sequence[int]) -> Case:
    """Whether the server that was asked still answers."""
    made = generate(url, prompt, params={"ingest": False}, max_new_tokens=4)
    return Case("the server afterwards", made.text, "" if made.token_ids else "it wrote nothing")


def _fault(lines: Sequence[str], word: str) -> str:
    """Why these are not one clear line that has `word`; empty: they are."""
    if len(lines) != 1:
        return f"{len(lines)} lines of an error, expected one"
    if len(lines[0]) > _LONGEST:
        return f"a line of {len(lines[0])} characters"
    return "" if word in lines[0] else f"it does not say {word!r}"
