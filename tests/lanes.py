"""How tests share a machine: what runs behind each other on one worker, and in which order.

Servers take 4 GB each, so what starts several comes where little else is under way.
"""

import os
import re

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

# The first to start comes first; what is in no group is one a file, behind them.
_GROUPS = (
    ("text", re.compile(r"tests/server/text/sssd/")),
    ("text", re.compile(r"tests/server/text/test_(?!datastore|sweep|disaggregation)")),
    ("text", re.compile(r"tests/server/text/test_disaggregation")),
    ("speech", re.compile(r"tests/server/speech/")),
    ("datastore", re.compile(r"tests/server/text/test_datastore")),
    ("sweep", re.compile(r"tests/server/text/test_sweep")),
    ("emulated server", re.compile(r"tests/emulated/test_server_lossless")),
)


def pin_worker() -> None:
    """Give this worker of pytest-xdist, and the servers that it starts, cores of their own."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        cores = sorted(os.sched_getaffinity(0))
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        own = cores[number % len(cores) :: workers]
        os.sched_setaffinity(0, own)
        # The first process of the tests counted all cores.
        for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ[name] = str(len(own))
        torch.set_num_threads(len(own))  # plugins may have loaded torch before


def arrange(items: list[pytest.Item]) -> None:
    """Sort tests; files keep their order within a group, and tests theirs within a file."""
    items.sort(key=lambda item: _place(item.nodeid))


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """Hands a group to a worker at a time, in the order of the tests.

    pytest-xdist's own `loadgroup` reads marks, and finds none with pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        place = _place(nodeid)
        return _GROUPS[place][0] if place < len(_GROUPS) else nodeid.partition("::")[0]


def _place(nodeid: str) -> int:
    matches = (place for place, (_, path) in enumerate(_GROUPS) if path.match(nodeid))
    return next(matches, len(_GROUPS))
