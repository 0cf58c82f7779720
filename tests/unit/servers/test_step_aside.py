"""How a process makes way for a server on the same machine."""

import os
import subprocess
import sys

import pytest

from sglang_ext.servers import processes
from sglang_ext.servers.step_aside import Rests, Taken, copies_beside_a_server


def taken_after(clock: float, idle: float, own: float) -> Taken:
    now = Taken.now()
    return Taken(now.clock + clock, now.idle + idle, now.own + own)


def test_rests_where_no_processor_is_to_spare() -> None:
    rests = Rests()
    # Nothing is known yet.
    assert rests.worth(0.001, taken_after(0.1, 0.2, 0)) == pytest.approx(0.049)
    assert rests.worth(0.001, taken_after(1, 0.3, 0.02)) == pytest.approx(0.049)


def test_works_on_where_one_is_idle_and_rests_again_where_it_is_no_more() -> None:
    rests = Rests()
    assert rests.worth(0.001, taken_after(1, 1.9, 0.05)) == 0
    assert rests.worth(0.001, taken_after(1.1, 1.9, 0.1)) == 0, "looked again too soon"
    # What this process takes itself is to spare as well.
    assert rests.worth(0.001, taken_after(2, 2.9, 0.95)) == 0
    assert rests.worth(0.001, taken_after(3, 3.0, 1.0)) > 0


@pytest.mark.parametrize(
    ("line", "does"),
    [
        ("datastore snapshot store copy", True),
        ("datastore push --url http://127.0.0.1:30000 s3://a/b", True),
        ("datastore push --url=http://127.0.0.1:30000 s3://a/b", True),
        ("datastore push store s3://a/b", False),
        ("serve --url http://127.0.0.1:30000", False),
        ("", False),
    ],
)
def test_what_copies_beside_a_server_is_told_by_its_arguments(line: str, does: bool) -> None:
    assert copies_beside_a_server(line.split()) == does


BUSY_FOR_A_WHILE = """
import time
from sglang_ext.servers import processes
from sglang_ext.servers.step_aside import step_aside
step_aside()
began, over = time.process_time(), time.monotonic() + 2
while time.monotonic() < over: pass
print(time.process_time() - began)
"""


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs Linux's /proc/stat")
def test_takes_little_beside_busy_processors() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    others = [processes.start(spin) for _ in range(os.cpu_count() or 1)]
    try:
        used = subprocess.run(
            [sys.executable, "-c", BUSY_FOR_A_WHILE], check=True, capture_output=True, text=True
        )
    finally:
        for other in others:
            processes.stop_group(other)
    # 0.04 of the second that it would have.
    assert float(used.stdout) < 0.3
