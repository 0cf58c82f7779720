"""Waiting for a word of shared memory to change, and waking who waits: Linux's futex(2).

Between processes and without the GIL: ctypes lets it go for the length of a call.
"""

import ctypes
import platform
import time

# The system call's number, by machine (linux/arch/*/entry/syscalls).
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1  # FUTEX_WAIT and FUTEX_WAKE of linux/futex.h, for shared memory
_POLL_S = 2e-4  # where there is no futex
_NUMBER = _NUMBERS.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def wait_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, at most `seconds`.

    It may return early, so callers look again at what they wait for.
    """
    if _NUMBER is None:
        time.sleep(min(seconds, _POLL_S))
        return
    whole = int(seconds)
    timeout = _Timespec(whole, int((seconds - whole) * 1e9))
    _libc.syscall(
        ctypes.c_long(_NUMBER),
        ctypes.c_void_p(address),
        ctypes.c_int(_WAIT),
        ctypes.c_uint32(value),
        ctypes.byref(timeout),
        None,
        ctypes.c_int(0),
    )


def wake(address: int) -> None:
    """Wake the one that sleeps on the word at `address`, if there is one."""
    if _NUMBER is not None:
        _libc.syscall(
            ctypes.c_long(_NUMBER), ctypes.c_void_p(address), ctypes.c_int(_WAKE), ctypes.c_int(1)
        )
