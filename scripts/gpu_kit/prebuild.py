"""Compiles FlashInfer's kernels for sm_90a ahead, on a machine with nvcc and without a GPU.

    python -m scripts.gpu_kit.prebuild --into DIR [--head-dims 64,128]

FlashInfer looks for `data/aot/NAME/NAME.so` in its own package before it compiles; `--pack` puts
what lies in DIR there. The libraries talk to Python through tvm_ffi, which has an ABI of its own,
so they do not depend on torch's version. SGLang's own JIT kernels are not shipped: its cache keys
hold the compiler's version and target, and each compiles in seconds.
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Of Hopper, with the instructions that only it has.
ARCHITECTURE = "9.0a"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_kit.prebuild", description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="where the libraries go")
    parser.add_argument("--head-dims", default="64,128", help="of the targets [64,128]")
    args = parser.parse_args()
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = ARCHITECTURE
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(args.into.resolve())
    os.environ.setdefault("MAX_JOBS", "2")
    if shutil.which("nvcc") is None:
        print("prebuild: error: no nvcc on the PATH", file=sys.stderr)
        return 2
    args.into.mkdir(parents=True, exist_ok=True)
    # Absolute: ninja links in a folder of its own.
    os.environ["LIBRARY_PATH"] = str(_libraries_to_link(args.into.resolve() / "link"))
    os.environ["CPATH"] = str(_cuda_wheels() / "include")
    failed = 0
    for spec in specs([int(text) for text in args.head_dims.split(",")]):
        failed += not _build(spec, args.into)
    return int(failed > 0)


def specs(head_dims: list[int]) -> list[Any]:
    """FlashInfer's build specifications of what a bf16 Llama's verify and decode steps call."""
    import torch
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.quantization import gen_quantization_module
    from flashinfer.jit.sampling import gen_sampling_module
    from flashinfer.prefill import _gen_batch_prefill_primary_module

    bf16, int32 = torch.bfloat16, torch.int32
    # Custom masks are packed to bits; requests that are not greedy are sampled.
    # Of a prompt in chunks two parts are merged ("cascade"); "norm" is SGLang's choice on a GPU.
    found = [
        gen_quantization_module(), gen_sampling_module(), gen_cascade_module(), gen_norm_module(),
    ]  # fmt: skip
    for dim in head_dims:
        kind = bf16, bf16, bf16, int32, dim, dim, 0, False, False
        # One library has every mask: none, causal and custom. On Hopper a prompt is read by "fa3";
        # of "fa2" FlashInfer takes the library for keys and values of equal strides.
        found.append(_gen_batch_prefill_primary_module("fa2", *kind, False))
        found.append(gen_batch_prefill_module("fa3", *kind, False))
        found.append(gen_batch_decode_module(*kind))
    return found


def _libraries_to_link(folder: Path) -> Path:
    """A folder with what the linker asks for: the wheel's CUDA runtime, and a driver without
    functions in place of the one that only a machine with a GPU has."""
    folder.mkdir(exist_ok=True)
    runtime = next(_cuda_wheels().glob("lib/libcudart.so.*"))
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(runtime)
    subprocess.run(
        ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null",
         "-o", str(folder / "libcuda.so")],
        check=True, timeout=60,
    )  # fmt: skip
    return folder


def _cuda_wheels() -> Path:
    """Where the wheels of CUDA lie: the runtime, and curand's headers, which a bare nvcc lacks."""
    return Path(next(iter(importlib.import_module("nvidia.cu13").__path__)))


def _build(spec: Any, into: Path) -> bool:
    target = into / "aot" / spec.name / f"{spec.name}.so"
    if target.exists():
        print(f"{spec.name}: there already", flush=True)
        return True
    start = time.monotonic()
    try:
        spec.build(verbose=False)
    except Exception as error:  # a compiler's, of whatever kind: said, and the next one tried
        print(f"{spec.name}: failed: {str(error)[-600:]}", flush=True)
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(spec.jit_library_path, target)
    size = target.stat().st_size / 2**20
    print(f"{spec.name}: {time.monotonic() - start:.0f} s, {size:.1f} MiB", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
