"""The folder of the control sockets."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_ext.api.datastore import protocol


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A folder for temporary files of one's own, where no server has run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Set and taken away, so that what make_folder sets goes too.
    monkeypatch.setenv(protocol.FOLDER_VARIABLE, "")
    monkeypatch.delenv(protocol.FOLDER_VARIABLE)
    return tmp_path


def of_one_that_ended(base: Path) -> Path:
    """The folder of a process that is no more."""
    print_pid = [sys.executable, "-c", "import os; print(os.getpid())"]
    ended = subprocess.run(print_pid, capture_output=True, text=True, check=True)
    left = base / f"sglang-ext-{int(ended.stdout)}-left"
    left.mkdir()
    return left


def test_folders_of_ended_servers_go_and_those_of_running_ones_stay(base):
    left, running = of_one_that_ended(base), base / f"sglang-ext-{os.getppid()}-runs"
    running.mkdir()
    protocol.make_folder()
    assert not left.exists() and running.exists()
    assert protocol.folder().parent == base and protocol.folder().stat().st_mode & 0o777 == 0o700


def test_two_servers_may_tidy_up_at_once(base, monkeypatch):
    left, exists = of_one_that_ended(base), protocol.psutil.pid_exists

    def other_is_quicker(pid: int) -> bool:
        shutil.rmtree(left)
        return exists(pid)

    monkeypatch.setattr(protocol.psutil, "pid_exists", other_is_quicker)
    protocol.make_folder()
    assert protocol.folder().is_dir()
