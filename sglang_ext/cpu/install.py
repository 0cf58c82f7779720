"""Makes `sgl_kernel` importable on machines without a GPU, before SGLang loads.

SGLang's CPU engine imports `sgl_kernel` while its modules load, and the wheel on PyPI holds CUDA
code only. `install` puts a finder in front of Python's own: at the first import of `sgl_kernel` it
tries the real package and, where that does not work, serves the functions of `kernels` instead.

SGLang starts its processes with multiprocessing spawn, whose children import the launcher's main
module again: a launcher that calls `install` while it is imported covers them all. This module
imports neither torch nor SGLang, so that a launcher can afford it.
"""

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence

from sglang_ext.cpu.cgroup_limits import allowed_processors

_PACKAGE = "sgl_kernel"
# Kernels for GPUs that SGLang imports where it finds them, and does without where it does not: 3 s
# and 145 MB in each of a server's three processes.
_GPU_PACKAGE = "flashinfer"
_CUDA_HIDDEN = ("", "-1")

# Only set where the user has not.
_ENVIRONMENT = {
    # Selects SGLang's CPU engine (sglang.srt.utils.common.is_cpu).
    "SGLANG_USE_CPU_ENGINE": "1",
    # A pass takes its batch as it is: a copy in buffers of its own serves graphs alone, and took 1%
    # of a small model's step.
    "SGLANG_EAGER_INPUT_NO_COPY": "1",
    # Waits for work as torch's threads do; TBB's own pool would compete with them for the cores.
    "NUMBA_THREADING_LAYER_PRIORITY": "omp tbb workqueue",
    # Huge pages for weights: layers run a few percent faster, and equally fast in every process.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def install() -> bool:
    """Prepare this process and its children for SGLang's CPU engine; idempotent.

    Does nothing where an accelerator is present, unless SGLANG_USE_CPU_ENGINE=1 asks for the CPU.
    Call it before anything of SGLang is imported.

    Returns:
        True where SGLang will run on the CPU.
    """
    if not wants_cpu_engine():
        return False
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores())).split(",")[0].strip()
    if threads.isdecimal():
        # Else all processors: and the first compiled loop with threads has torch take as many.
        os.environ.setdefault("NUMBA_NUM_THREADS", threads)
    if "OMP_WAIT_POLICY" not in os.environ:
        # libgomp's threads spin for about 5 ms at every barrier, some 120 of them per token. When
        # another program wants the cores, that makes a server 8 times slower; this is a few
        # hundred us, enough to bridge the Python code between two of a layer's products.
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return True


def hide_gpu_packages() -> None:
    """Have this process do without kernels for GPUs, as if they were not installed.

    Behind `install`, where that returned True. What emulates a GPU does not call it.
    """
    # Python's own way to say that there is no such module (importlib.import_module, find_spec).
    sys.modules.setdefault(_GPU_PACKAGE, None)  # type: ignore[arg-type]


def wants_cpu_engine() -> bool:
    """Whether SGLang should run on the CPU: as SGLANG_USE_CPU_ENGINE says, else without a GPU."""
    choice = os.environ.get("SGLANG_USE_CPU_ENGINE")
    return choice == "1" if choice is not None else not accelerator_present()


def accelerator_present() -> bool:
    """Whether an NVIDIA or AMD GPU is visible, found without starting a CUDA context."""
    if os.path.exists("/dev/kfd"):
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in _CUDA_HIDDEN:
        return False
    # NVML and not cuInit: a parent that has called cuInit cannot fork CUDA processes.
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if nvml.nvmlInit_v2() != 0:
        return False
    count = ctypes.c_uint(0)
    found = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0
    nvml.nvmlShutdown()
    return found


def usable_cores() -> int:
    """Physical cores this process may run on (hyperthreads slow fp32 products down).

    No more than whole ones that a container's limit pays for; at least 1.
    """
    allowed = allowed_processors()
    cores = _physical_cores()
    return cores if allowed is None else max(1, min(cores, int(allowed)))


def _physical_cores() -> int:
    logical = os.sched_getaffinity(0)
    siblings = set()
    for cpu in logical:
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            with open(path, encoding="ascii") as file:
                siblings.add(file.read())
        except OSError:
            return len(logical)
    return max(1, len(siblings))


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for `sgl_kernel` only; every other import goes on to Python's own finders."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _PACKAGE:
            real = importlib.machinery.PathFinder.find_spec(_PACKAGE)
            spec = importlib.machinery.ModuleSpec(_PACKAGE, _Loader(real), is_package=True)
            # The real package imports its own submodules while it loads.
            spec.submodule_search_locations = list(
                (real.submodule_search_locations if real else None) or []
            )
            return spec
        if fullname.startswith(_PACKAGE + ".") and is_stand_in(sys.modules.get(_PACKAGE)):
            raise ModuleNotFoundError(
                f"{fullname} is not available: on this CPU, {_PACKAGE} is sglang_ext's stand-in, "
                "which has the functions of sglang_ext/cpu/kernels.py only.",
                name=fullname,
            )
        return None


class _Loader(importlib.abc.Loader):
    """Runs the real package where it works, and fills in the stand-in where it does not."""

    def __init__(self, real: importlib.machinery.ModuleSpec | None) -> None:
        self._real = real

    def exec_module(self, module: types.ModuleType) -> None:
        if self._real is None or self._real.loader is None:
            _become_stand_in(module)
            return
        module.__file__ = self._real.origin
        try:
            self._real.loader.exec_module(module)
        except Exception:  # whatever stops the real one: no driver, no library, wrong build
            _become_stand_in(module)
            return
        if not _has_cpu_operators():
            _become_stand_in(module)


def is_stand_in(module: types.ModuleType | None) -> bool:
    """Whether `module` is the stand-in for `sgl_kernel` that this file made."""
    return getattr(module, "__sglang_ext_stand_in__", False) is True


def _has_cpu_operators() -> bool:
    import torch

    return hasattr(torch.ops.sgl_kernel, "verify_tree_greedy_cpu")


def _become_stand_in(module: types.ModuleType) -> None:
    """Turn the (partly loaded) package into one that has the functions of `kernels`."""
    for name in [name for name in sys.modules if name.startswith(_PACKAGE + ".")]:
        del sys.modules[name]
    for name in [name for name in vars(module) if not name.startswith("__")]:
        delattr(module, name)

    from sglang_ext.cpu import kernels

    _fill(module, kernels)
    module.__path__ = []
    speculative = types.ModuleType(_PACKAGE + ".speculative")
    _fill(speculative, kernels)
    sys.modules[speculative.__name__] = speculative
    module.__dict__["speculative"] = speculative


def _fill(module: types.ModuleType, kernels: types.ModuleType) -> None:
    def missing(name: str) -> object:
        raise AttributeError(
            f"{module.__name__}.{name} has no CPU version in sglang_ext/cpu/kernels.py"
        )

    module.__file__ = kernels.__file__  # shown by Python where a name cannot be imported
    module.__dict__["__sglang_ext_stand_in__"] = True
    module.__dict__["__getattr__"] = missing
    for name in kernels.__all__:
        module.__dict__[name] = getattr(kernels, name)
