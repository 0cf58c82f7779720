"""Whatever ends who started a program ends the program, and all that the program started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang_ext.servers import processes
from tests.eventually import eventually

DEADLINE_S = 60
# It starts a child in a session of its own, that one's child in another, a child that is deaf to
# SIGTERM, and one whose parent ends at once; each writes its process id to FOLDER, and its own the
# program writes last.
PROGRAM = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def child(name, prepare):
    if os.fork() == 0:
        prepare()
        (folder / name).write_text(str(os.getpid()))
        time.sleep(600)
def orphan():
    if os.fork():
        os._exit(0)
def nested():
    os.setsid()
    (folder / "outer").write_text(str(os.getpid()))
    if os.fork():
        time.sleep(600)
    os.setsid()
child("inner", nested)
child("deaf", lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
child("orphan", orphan)
while len(list(folder.iterdir())) < 4:  # the three, and the outer session
    time.sleep(0.01)
(folder / "itself").write_text(str(os.getpid()))
time.sleep(600)
"""
# Started by a thread that ends: the kernel's parent-death signal comes then, too early.
STARTER = """
import sys, threading, time
from sglang_ext.servers import processes
processes.GRACE_S = 0.3
def start():
    processes.start([sys.executable, "-c", *sys.argv[2:]])
thread = threading.Thread(target=start)
thread.start(); thread.join()
print("started", flush=True)
if sys.argv[1] == "raises":
    sys.stdin.readline()
    raise SystemExit("a bug")
sys.stdin.read()
"""


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def pids(folder: Path) -> list[int]:
    """Of the program and its children, when all are there."""
    eventually(lambda: (folder / "itself").exists() and (folder / "itself").read_text())
    return [int(file.read_text()) for file in folder.iterdir()]


def starter(folder: Path, does: str = "waits") -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, does, PROGRAM, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_starter_ends_all(tmp_path, number):
    with starter(tmp_path) as process:
        found = pids(tmp_path)
        assert process.stdout.readline() == b"started\n" and all(map(running, found))
        process.send_signal(number)
    eventually(lambda: not any(map(running, found)))


def test_an_exception_of_the_starter_ends_all(tmp_path):
    with starter(tmp_path, "raises") as process:
        found = pids(tmp_path)
        assert all(map(running, found))
        process.stdin.close()
    assert process.returncode == 1
    eventually(lambda: not any(map(running, found)))


def test_a_starter_that_is_killed_while_its_program_is_stopped_ends_all(tmp_path):
    with starter(tmp_path) as process:
        found = pids(tmp_path)
        (supervisor,) = psutil.Process(process.pid).children()
        os.killpg(supervisor.pid, signal.SIGSTOP)
        eventually(lambda: supervisor.status() == psutil.STATUS_STOPPED)
        process.kill()
    eventually(lambda: not any(map(running, found)))


def test_the_program_s_end_ends_what_it_left(tmp_path):
    process = processes.start([sys.executable, "-c", PROGRAM, str(tmp_path)])
    found = pids(tmp_path)
    os.kill(int((tmp_path / "itself").read_text()), signal.SIGSEGV)
    assert process.wait(DEADLINE_S) == -signal.SIGSEGV
    assert not any(map(running, found))


def test_kill_minus_9_of_the_supervisor_ends_the_program(tmp_path):
    process = processes.start([sys.executable, "-c", PROGRAM, str(tmp_path)])
    found = pids(tmp_path)
    process.kill()
    process.wait(DEADLINE_S)
    eventually(lambda: not running(int((tmp_path / "itself").read_text())))
    for pid in found:  # SGLang's own children ask for a parent-death signal; these do not
        if running(pid):
            os.kill(pid, signal.SIGKILL)


COUNTS = """
import pathlib, signal, sys, time
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
pathlib.Path(sys.argv[1]).write_text("ready")
while not seen:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(10 + len(seen))
"""


def counting(tmp_path: Path) -> "subprocess.Popen[bytes]":
    """A program that ends at SIGTERM with 10 and the number of times it came."""
    process = processes.start([sys.executable, "-c", COUNTS, str(tmp_path / "ready")])
    eventually((tmp_path / "ready").exists)
    return process


def test_stopping_the_group_tells_the_program_once(tmp_path):
    process = counting(tmp_path)
    processes.stop_group(process)
    assert process.returncode == 11


def test_a_signal_to_the_supervisor_alone_is_passed_on(tmp_path):
    process = counting(tmp_path)
    subprocess.run(["/bin/sh", "-c", f"kill -TERM {process.pid}"], check=True)
    assert process.wait(DEADLINE_S) == 11


def test_a_program_s_exit_code_and_output_come_through(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        process = processes.start(["/bin/sh", "-c", "read x; echo $x; exit 7"],
                                  stdin=subprocess.PIPE, stdout=log)  # fmt: skip
        process.communicate(b"hello\n", DEADLINE_S)
    assert process.returncode == 7 and (tmp_path / "log").read_text() == "hello\n"


def test_a_program_that_is_not_there_is_named(tmp_path):
    process = processes.start(["no-such-program"], stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 127
    assert said == b"cannot start no-such-program: No such file or directory\n"
