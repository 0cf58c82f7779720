"""Phase 1: what the machine is, and whether SGLang's and our modules load on it."""

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import time

import torch

from scripts.gpu_kit.kit import Part

DISTRIBUTIONS = (
    "sglang", "sglang-kernel", "flashinfer-python", "torch", "triton", "transformers", "xgrammar",
    "apache-tvm-ffi", "numpy",
)  # fmt: skip
MODULES = (
    "sglang", "sglang.srt.managers.scheduler", "sglang.srt.entrypoints.engine", "flashinfer",
    "sglang.srt.layers.attention.flashinfer_backend",
    "sglang.srt.layers.attention.triton_backend", "sglang_ext.worker",
)  # fmt: skip


def look(part: Part) -> None:
    """Versions, the device, imports, the compiled operators of sgl_kernel, the compiler."""
    with part.attempt("machine"):
        part.result("machine", True, **machine(), versions=versions())
    with part.attempt("sgl_kernel"):
        _operators(part)
    for module in MODULES:
        with part.attempt(f"import {module}"):
            start = time.perf_counter()
            importlib.import_module(module)
            seconds = round(time.perf_counter() - start, 2)
            part.result(f"import {module}", True, seconds=seconds)
    with part.attempt("plugin"):
        names = [e.name for e in importlib.metadata.entry_points(group="sglang.srt.plugins")]
        part.result("plugin", "sglang_ext" in names, found=names)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        part.not_run("compiler", "no nvcc on the PATH: only prebuilt JIT modules can be used")
    else:
        with part.attempt("compiler"):
            said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30)
            part.result("compiler", said.returncode == 0, nvcc=said.stdout.splitlines()[-1:])


def _operators(part: Part) -> None:
    if part.kit.emulated:
        part.not_run("sgl_kernel", "its compiled operators need CUDA; a CPU has our stand-in")
        return
    importlib.import_module("sgl_kernel")
    names = ("rmsnorm", "silu_and_mul", "fused_add_rmsnorm")
    missing = [name for name in names if not hasattr(torch.ops.sgl_kernel, name)]
    part.result("sgl_kernel", not missing, missing=missing)


def machine() -> dict[str, object]:
    """Python, processor and GPU."""
    found: dict[str, object] = {
        "python": platform.python_version(),
        "torch_cuda": torch.version.cuda,
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        }
    return found


def versions() -> dict[str, str | None]:
    """Installed versions by distribution; None: it is not there."""
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


PARTS = {"look": look}
