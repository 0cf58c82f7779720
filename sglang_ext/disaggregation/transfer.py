"""Whether what moves the KV between servers can be loaded here, before any server is started."""

import subprocess
import sys
from importlib.util import find_spec

from sglang_ext.preflight import PreflightError

# backend -> (its package, the module that SGLang imports of it).
BACKENDS = {
    "mooncake": (
        "mooncake-transfer-engine (with a GPU) or mooncake-transfer-engine-non-cuda",
        "mooncake.engine",
    ),
    "nixl": ("nixl", "nixl._api"),
}
# Libraries that these packages take from the system, and Debian's and Ubuntu's packages of them.
_SYSTEM_LIBRARIES = {
    "libibverbs": "libibverbs1", "librdmacm": "librdmacm1", "libnuma": "libnuma1",
    "libcurl": "libcurl4", "liburing": "liburing2",
}  # fmt: skip
# What the first two of them are: one comes seldom without the other.
_RDMA = ("libibverbs1", "librdmacm1")
_TIMEOUT_S = 120


def check_transfer_backend(name: str) -> None:
    """Load a backend's library, in a process that ends again.

    Args:
        name: of BACKENDS.

    Raises:
        PreflightError: it is not installed or cannot be loaded; the message says what to install.
    """
    package, module = BACKENDS[name]
    if find_spec(name) is None:
        raise PreflightError(
            f"--transfer-backend {name} needs the package {package}: pip install 'sglang-ext[pd]'"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PreflightError(
            f"--transfer-backend {name}: importing {module} took over {_TIMEOUT_S} s"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise PreflightError(f"--transfer-backend {name}: {_advice(said[-1])}")


def _advice(error: str) -> str:
    """The dynamic linker's words and what to do about them."""
    for library, package in _SYSTEM_LIBRARIES.items():
        if f"{library}.so" in error:
            packages = " ".join(_RDMA) if package in _RDMA else package
            return (
                f"the library {library} cannot be loaded; on Debian and Ubuntu: "
                f"apt install {packages} ({error})"
            )
    return f"its package cannot be loaded: {error}"
