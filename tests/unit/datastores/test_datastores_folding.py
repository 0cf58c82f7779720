"""The folding process ends with the datastore's process."""

import os
import subprocess
import sys
from pathlib import Path

from tests.eventually import eventually

# A child that is forked later holds both pipes to the folding process, which sees no end of file.
STARTER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from datastores.folding import FoldWorker
process = FoldWorker()._start()
if os.fork() == 0:
    os.read(0, 1)
    os._exit(0)
print(process.pid, flush=True)
os.read(0, 1)
"""


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_kill_minus_9_of_its_parent_ends_it_although_its_pipes_stay_open():
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(Path(__file__).parents[3])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert running(pid)
        starter.kill()
        starter.wait()
        try:
            eventually(lambda: not running(pid), what="the folding process ends")
        finally:
            if running(pid):
                os.kill(pid, 9)
