"""Lays an archive of `--pack` out on a bare GPU machine; needs Python and `xz` support alone."""

import sys
import tarfile
from pathlib import Path


def unpack(archive: Path, into: Path) -> int:
    """Extract, and print the variables that a shell there needs."""
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(into, filter="data")
    print(f'export PYTHONPATH="{into.resolve()}:{Path.cwd()}" FLASHINFER_DISABLE_VERSION_CHECK=1')
    return 0


if __name__ == "__main__":
    sys.exit(unpack(Path(sys.argv[1]), Path(sys.argv[2])))
