"""What a process has made itself, told from the files that it maps."""

import mmap
import os

from scripts.lib.own_memory import growth_mib, own_mib

MIB = 1 << 20


def test_memory_that_is_written_counts_and_mapped_files_do_not(tmp_path):
    before = own_mib(os.getpid())
    path = tmp_path / "mapped"
    path.write_bytes(bytes(64 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # every page is there
        assert growth_mib(before, own_mib(os.getpid())) < 32
        # Of the system and not of the heap, which may have as much that is free.
        with mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
            for _ in range(64):
                held.write(os.urandom(MIB))
            assert growth_mib(before, own_mib(os.getpid())) > 60


def test_processes_that_came_or_went_are_left_out():
    assert growth_mib({1: 10.0, 2: 500.0}, {1: 12.5, 3: 900.0}) == 2.5
