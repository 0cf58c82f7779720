"""Whoever starts a process sees to it that the process ends with it, kill -9 included."""

import ast
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.eventually import eventually
from tests.unit.servers.test_supervisor import running

ROOT = Path(__file__).parents[3]
FOLDERS = ("sglang_ext", "speech", "datastores", "scripts", "tests")
# Calls that leave a process behind; subprocess.run and its like wait for it.
STARTS = {
    "Popen", "create_subprocess_exec", "create_subprocess_shell", "posix_spawn", "posix_spawnp",
    "fork", "forkpty", "ProcessPoolExecutor",
}  # fmt: skip
ALLOWED = {
    "sglang_ext/servers/processes.py": "starts the supervisor, which ends with whoever called",
    "sglang_ext/servers/supervisor.py": "is the supervisor",
    "speech/decoder_client.py": "SIGIO ends a decoder when its parent's end of a pipe is closed",
    "datastores/folding.py": "the process looks for its parent; the package stands alone",
    "scripts/bench_load.py": "multiprocessing's child calls end_with_parent",
    "scripts/fuzz_audio.py": "multiprocessing's child calls end_with_parent",
    "tests/unit/servers/test_started_processes.py": "kills a starter of its own",
    "tests/unit/servers/test_supervisor.py": "kills starters, which end with a pipe of the test",
    "tests/unit/step/test_step_plan.py": "two ranks that end within seconds",
    "tests/unit/datastores/test_datastores_durable.py": "kills writers; the same",
    "tests/unit/datastores/test_datastores_fleet.py": "kills servers, which end with their input",
    "tests/unit/datastores/test_datastores_folding.py": "kills a starter; the same",
    "tests/unit/datastores/test_datastores_following.py": "kills a writer; the same",
    "tests/unit/cpu/test_fork_server.py": "kills a launcher, which is what it tests",
    "tests/server/refused_commands.py": "commands that an alarm ends",
    "tests/unit/models/test_fetch.py": "a download of seconds that is killed",
    "tests/unit/speech/test_decoders.py": "kills a decoders' parent; a supervisor would end them",
}  # fmt: skip


def starts(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls in a module that start a process and go on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            # multiprocessing's; psutil's Process takes no target.
            process = name == "Process" and any(k.arg == "target" for k in node.keywords)
            if name in STARTS or process:
                yield node


@pytest.fixture(scope="module")
def found() -> dict[str, list[int]]:
    """Lines of such calls, by file."""
    files = {f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")}
    calls = {
        file.relative_to(ROOT).as_posix(): [c.lineno for c in starts(ast.parse(file.read_text()))]
        for file in files
    }
    assert len(calls) > 200
    return {file: lines for file, lines in calls.items() if lines}


def test_processes_are_started_by_processes_start(found):
    others = {file: lines for file, lines in found.items() if file not in ALLOWED}
    assert not others, "start them with sglang_ext.servers.processes.start"


def test_what_is_allowed_is_there(found):
    assert set(ALLOWED) == set(found)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("subprocess.Popen(['x'])", 1),
        ("await asyncio.create_subprocess_exec('x')", 1),
        ("Popen(['x'])", 1),
        ("context.Process(target=f)", 1),
        ("if os.fork(): pass", 1),
        ("psutil.Process(1); subprocess.run(['x']); processes.start(['x'])", 0),
    ],
)
def test_every_way_to_start_one_is_seen(code, count):
    assert len(list(starts(ast.parse(code)))) == count


STARTER = """
import multiprocessing, os, time
from sglang_ext.servers.processes import end_with_parent
def loop(told):
    end_with_parent()
    told.send(os.getpid())
    while True:
        pass
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=loop, args=(there,), daemon=True)
    process.start()
    print(here.recv(), flush=True)
    input()
"""


def test_kill_minus_9_of_its_parent_ends_a_child_of_multiprocessing(tmp_path):
    program = tmp_path / "starter.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{STARTER}")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        pid = int(starter.stdout.readline())
        assert running(pid)
        starter.send_signal(signal.SIGKILL)
    try:
        eventually(lambda: not running(pid))
    finally:
        if running(pid):
            psutil.Process(pid).kill()
