"""Finding what there is to read."""

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from .source import Source, SourceError

_FORMAT_OF = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npy": "npy"}
_TEXT_ENDINGS = frozenset(
    f".{ending}"
    for group in (
        ("txt", "text", "md", "markdown", "rst", "tex", "adoc", "org", "html", "htm", "xml"),
        ("csv", "tsv", "sql", "yaml", "yml", "toml", "ini", "cfg", "proto", "tf", "cmake"),
        ("py", "pyi", "js", "mjs", "jsx", "ts", "tsx", "css", "vue", "sh", "bash", "zig", "dart"),
        ("c", "h", "cc", "cpp", "cxx", "hpp", "cu", "cuh", "rs", "go", "java", "kt", "scala"),
        ("cs", "fs", "swift", "m", "rb", "php", "pl", "r", "jl", "lua", "hs", "ml", "ex", "exs"),
    )
    for ending in group
)


def find_sources(
    paths: Sequence[str], format: str = "auto", glob: str | None = None
) -> tuple[list[Source], int]:
    """What there is to read at these paths, and how many files in folders were left out.

    Folders are searched to any depth, hidden names and empty files excepted. format: one of
    FORMATS for all, or "auto": by the ending of the name. glob: which files of folders to take
    ("*.md" for names, "notes/*.md" for paths below the folder); else those whose ending is known.

    Raises SourceError: a path is missing or cannot be read, a named file is empty, or there is
    nothing to read.
    """
    found: dict[str, Source] = {}
    left_out = 0
    for path in paths:
        if not os.path.exists(path):
            raise SourceError(f"there is no file or folder {path}")
        if not os.path.isdir(path):
            if not os.path.isfile(path):
                raise SourceError(f"{path} is neither a file nor a folder")
            if os.path.getsize(path) == 0:
                raise SourceError(f"{path} is empty")
            found[os.path.abspath(path)] = _file_source(path, _format_of(path, format))
            continue
        before = len(found)
        for candidate in _walk(path):
            taken = _take(path, candidate, format, glob)
            if taken is None:
                left_out += 1
            else:
                found[os.path.abspath(candidate)] = taken
        if len(found) == before:
            kinds = f"that match {glob!r}" if glob else "of a known kind; --glob '*' takes all"
            raise SourceError(f"folder {path} holds no files {kinds}")
    return list(found.values()), left_out


def _walk(folder: str) -> Iterator[str]:
    """Files and Hugging Face datasets of a folder, in an order that is always the same."""

    def fail(error: OSError) -> None:
        raise SourceError(f"cannot read folder {error.filename}: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=fail):
        if "state.json" in names and "dataset_info.json" in names:
            folders.clear()
            yield root
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(root, n) for n in sorted(names) if not n.startswith("."))


def _take(folder: str, path: str, format: str, glob: str | None) -> Source | None:
    if os.path.isdir(path):
        return _hf_source(path) if format in ("auto", "hf") else None
    if not os.path.isfile(path) or os.path.getsize(path) == 0 or format == "hf":
        return None
    below = os.path.relpath(path, folder)
    if glob is not None:
        if not (fnmatch(below, glob) or fnmatch(os.path.basename(path), glob)):
            return None
        return _file_source(path, _format_of(path, format))
    known = _TEXT_ENDINGS | _FORMAT_OF.keys()
    if _ending(path) not in known or (format != "auto" and format != _format_of(path, "auto")):
        return None
    return _file_source(path, _format_of(path, format))


def _ending(path: str) -> str:
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def _format_of(path: str, format: str) -> str:
    if format == "hf":
        raise SourceError(f"{path} is no folder that datasets.save_to_disk() wrote")
    if format != "auto":
        return format
    ending = _ending(path)
    if ending == ".json":
        raise SourceError(f"{path}: say --format jsonl (one object per line) or --format text")
    if ending in (".npz", ".arrow", ".bz2", ".xz", ".zst", ".zip", ".tar", ".bin", ".pt"):
        raise SourceError(
            f"{path}: files of this kind cannot be read; expected text, JSON lines (both may be "
            ".gz), parquet, .npy, or a folder of a Hugging Face dataset"
        )
    return _FORMAT_OF.get(ending, "text")


def _file_source(path: str, format: str) -> Source:
    status = os.stat(path)
    return Source(path, format, status.st_size, status.st_mtime_ns)


def _hf_source(folder: str) -> Source:
    files = [entry.stat() for entry in os.scandir(folder) if entry.is_file()]
    return Source(folder, "hf", sum(f.st_size for f in files), max(f.st_mtime_ns for f in files))
