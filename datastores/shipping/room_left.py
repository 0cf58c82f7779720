"""Whether a copy will fit a disk, asked before it is begun."""

import shutil

from ..config import DatastoreError

# Left free for whatever else writes there, a server's logs among it.
_SPARE_BYTES = 1 << 26


def check_room(folder: str, nbytes: int) -> None:
    """DatastoreError unless the disk under a folder has room for so many bytes more."""
    free = shutil.disk_usage(folder).free
    if nbytes + _SPARE_BYTES > free:
        raise DatastoreError(
            f"{folder} has no room: the copy takes {nbytes / 1e6:,.1f} MB, and "
            f"{free / 1e6:,.1f} MB are free"
        )
