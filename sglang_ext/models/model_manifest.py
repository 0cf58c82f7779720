"""What a finished model directory says of itself, and whether that holds."""

import hashlib
import json
import os
from pathlib import Path

from sglang_ext.models.registry import ModelSpec

MANIFEST = "sglang_ext_manifest.json"
_FORMAT = 2


def write_manifest(directory: Path, spec: ModelSpec) -> None:
    """Record size and SHA-256 of every file in `directory`, all of it forced to disk first."""
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(0o644)  # safetensors makes its files readable by their owner only
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.name] = {"size": path.stat().st_size, "sha256": digest}
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**_header(spec), "files": files}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def find_problem(directory: Path, spec: ModelSpec, full: bool = False) -> str | None:
    """Why `directory` is not a complete, current copy of `spec`; None if it is.

    Args:
        full: read all files and compare SHA-256; otherwise only their sizes are compared.
    """
    if not directory.is_dir():
        return "not fetched"
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        header = {key: manifest[key] for key in _header(spec)}
        files = {name: (int(f["size"]), str(f["sha256"])) for name, f in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} is unreadable"
    if header != _header(spec):
        return "it was made from other sources or by another version of the conversion"
    for name, (size, sha256) in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if full:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return f"the sha256 of {name} differs"
    return None


def _header(spec: ModelSpec) -> dict[str, object]:
    """All that decides the directory's content, in JSON's types."""
    return {
        "format": _FORMAT,
        "model": spec.name,
        "licence": spec.licence,
        "recipe": spec.recipe,
        "converter": spec.converter,
        "packages": list(spec.packages),
        "sources": {file.name: file.sha256 for file in spec.files},
    }
