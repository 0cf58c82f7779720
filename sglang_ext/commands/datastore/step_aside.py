"""Lets a server on the same machine go first."""

import contextlib
import os

import psutil  # type: ignore[import-untyped]


def step_aside() -> None:
    """From here on this process runs when no other needs the processor or the disk."""
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
