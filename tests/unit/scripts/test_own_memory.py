"""What a process has made itself, told from the files that it maps."""

import mmap
import os
from pathlib import Path

import psutil
import pytest
import torch

from scripts.lib.own_memory import growth_mib, own_mib

MIB = 1 << 20


def on_a_disk(path: Path) -> bool:
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return mounts[next(m for m in map(str, path.resolve().parents) if m in mounts)] != "tmpfs"


# Torch's own library: a file that this test writes may be on a file system of memory.
LIBRARY = next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))


@pytest.mark.skipif(not on_a_disk(LIBRARY), reason="files of a tmpfs are shared memory")
def test_mapped_files_do_not_count():
    with LIBRARY.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        size = min(len(mapped), 64 * MIB)
        before = own_mib(os.getpid())
        assert sum(mapped[at] for at in range(0, size, mmap.PAGESIZE))  # every page is there
        assert growth_mib(before, own_mib(os.getpid())) < size / MIB / 2


def test_memory_that_is_written_counts():
    before = own_mib(os.getpid())
    # Of the system and not of the heap, which may have as much that is free.
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for _ in range(64):
            held.write(os.urandom(MIB))
        assert growth_mib(before, own_mib(os.getpid())) > 60


def test_processes_that_came_or_went_are_left_out():
    assert growth_mib({1: 10.0, 2: 500.0}, {1: 12.5, 3: 900.0}) == 2.5
