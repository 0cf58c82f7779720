"""`sglang-ext datastore info`: what a folder holds, while a server may be using it."""

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from datastores import Datastore, DatastoreInfo
from datastores.log_names import log_name
from datastores.manifest import read_manifest


def run(args: argparse.Namespace) -> int:
    """Prints it; returns the exit code."""
    with Datastore.open(args.folder, create=False, read_only=True) as store:
        info = store.info()
    unfinished, log_bytes = _unfinished(args.folder), _log_bytes(args.folder)
    if args.json:
        content: dict[str, Any] = asdict(info) | {"unfinished": unfinished, "log_bytes": log_bytes}
        print(json.dumps(content, indent=1))
        return 0
    print(f"datastore {info.path}")
    for name, value in _lines(info, unfinished, log_bytes):
        print(f"  {name:<11} {value}")
    return 0


def _lines(
    info: DatastoreInfo, unfinished: dict[str, int], log_bytes: int
) -> list[tuple[str, str]]:
    lines = [
        (
            "holds",
            f"{info.num_tokens:,} tokens, {info.num_documents:,} documents, "
            f"{info.sub_indices} sub-indices",
        ),
        *_named("corpora", info.corpora),
        *_named("namespaces", info.namespaces),
    ]
    if unfinished:
        lines += _named("unfinished", unfinished)
        lines.append(("", "(not served; the command that built them goes on with them)"))
    lines += [
        ("searches", f"{_mega(info.nbytes)}, {info.bytes_per_token:.2f} bytes per token"),
        ("on disk", f"{_mega(info.disk_bytes)}, of it {_mega(log_bytes)} logs"),
        (
            "tokenizer",
            f"{info.tokenizer_fingerprint or 'not noted'}, vocabulary of {info.vocab_size:,}",
        ),
        ("limit", f"{info.max_tokens:,} tokens of served outputs, unless the server is given less"),
    ]
    lines += [("problem", problem) for problem in info.problems]
    return lines


def _named(title: str, tokens: dict[str, int]) -> list[tuple[str, str]]:
    if not tokens:
        return [(title, "none")]
    rows = [f"{count:,} tokens in {name!r}" for name, count in sorted(tokens.items())]
    return [(title if i == 0 else "", row) for i, row in enumerate(rows)]


def _unfinished(folder: str) -> dict[str, int]:
    """Tokens stored so far by unfinished corpus."""
    manifest = read_manifest(folder)
    if manifest is None:
        return {}
    return {
        name: sum(file.tokens for file in manifest.files if file.corpus == name)
        for name in manifest.building
    }


def _log_bytes(folder: str) -> int:
    logs = (entry for entry in os.scandir(folder) if log_name(entry.name) is not None)
    return sum(entry.stat(follow_symlinks=False).st_size for entry in logs)


def _mega(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
