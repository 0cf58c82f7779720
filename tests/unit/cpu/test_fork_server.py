"""Processes forked from one that has imported: their environment, their parent, and their end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang_ext.cpu import fork_server
from tests.eventually import eventually

ROOT = Path(__file__).parents[3]
IMPORTS = """
import os
from sglang_ext.cpu.fork_server import stand_between
stand_between()
BY = os.getpid()
"""
LAUNCHER = """
import ctypes, json, multiprocessing, os, signal, sys, time
import psutil
import setproctitle
from sglang_ext.cpu import fork_server

def tell(writer):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as kill_itself_when_parent_died of SGLang
    setproctitle.setproctitle("sglang::told")
    imported = sys.modules["imports_of_the_test"].BY
    writer.send({
        "set later": os.environ.get("SET_LATER"), "parent": os.getppid(), "imported by": imported,
        "launcher": multiprocessing.parent_process().pid, "pid": os.getpid(),
        "unset later": os.environ.get("UNSET_LATER"), "name": psutil.Process().name(),
    })
    if "fail" in sys.argv:
        psutil.Process().parent().send_signal(signal.SIGQUIT)
    time.sleep(100)

def say(number, frame):
    print("SIGQUIT", flush=True)
    os._exit(3)

if __name__ == "__main__":
    fork_server._IMPORTS = "imports_of_the_test"
    assert fork_server.begin()
    os.environ["SET_LATER"] = "yes"
    del os.environ["UNSET_LATER"]
    signal.signal(signal.SIGQUIT, say)
    context = fork_server._Context()
    context.set_start_method("spawn", force=True)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(writer,))
    process.start()
    print(json.dumps(reader.recv() | {"started": process.pid}), flush=True)
    time.sleep(100)
"""


@pytest.fixture
def launched(tmp_path, request):
    """A launcher, and what its process told of itself."""
    (tmp_path / "imports_of_the_test.py").write_text(IMPORTS)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "UNSET_LATER": "yes"}
    command = [sys.executable, str(tmp_path / "launcher.py"), *getattr(request, "param", [])]
    launcher = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    try:
        yield launcher, json.loads(launcher.stdout.readline())
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()


def test_a_process_has_the_launchers_environment_and_what_the_fork_server_imported(launched):
    launcher, told = launched
    assert told["set later"] == "yes" and told["unset later"] is None
    assert told["started"] == told["pid"] and told["name"] == "sglang::told"
    assert told["parent"] == told["imported by"] != launcher.pid == told["launcher"]


@pytest.mark.parametrize("launched", [["fail"]], indirect=True)
def test_the_launcher_hears_of_a_process_that_fails(launched):
    launcher, _ = launched
    assert launcher.stdout.readline() == "SIGQUIT\n"
    assert launcher.wait(30) == 3


def test_all_end_with_the_launcher(launched):
    launcher, told = launched
    below = [psutil.Process(told[name]) for name in ("pid", "parent")]
    launcher.send_signal(signal.SIGKILL)
    eventually(lambda: not any(p.is_running() for p in below), 30)


def test_a_variable_has_processes_spawned(monkeypatch):
    monkeypatch.setenv(fork_server.FORK_SERVER_VARIABLE, "0")
    assert not fork_server.begin()
