"""check_operators: datastores that ship: their speed beside a plain copy, and exports built again.

The plain copy is `shutil.copyfile` of the same bytes, on the disk itself when it ends, as push to a
file:// address and pull are. All three take turns, on the same folder of the same disk.
"""

import argparse
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from datastores import Datastore, InputTrie, retrieve
from datastores.container import Container, write_container
from datastores.folder import Folder
from datastores.manifest import FileEntry
from datastores.segment import Document, build_segment
from datastores.shipping import pull, push
from scripts.lib import operators_snapshot
from scripts.lib.isolation_drafts import NothingShown
from scripts.lib.spec_bench import DATA
from sglang_ext.commands.datastore.model_tokenizer import ModelTokenizer

_BYTES, _QUICK_BYTES = 1 << 30, 1 << 27
_ROUNDS = 10
_VOCAB = 50_000
_SEGMENT_TOKENS = 1 << 21
_HELD_BACK = 200
_NODES = 30


def check(options: argparse.Namespace) -> dict[str, float]:
    """snapshot_p99_ratio, snapshot_problems, push_speed_ratio, pull_speed_ratio and
    export_draft_mismatches, with what they are made of.

    Raises:
        NothingShown: the exported corpus hardly drafts, or no snapshot fell into the load.
    """
    with tempfile.TemporaryDirectory(prefix="operators-ship-") as work:
        figures = speeds(Path(work), _QUICK_BYTES if options.quick else _BYTES)
    with tempfile.TemporaryDirectory(prefix="operators-ship-") as work:
        figures |= exported(Path(work), options.model)
    with tempfile.TemporaryDirectory(prefix="operators-ship-") as work:
        figures |= operators_snapshot.under_load(Path(work), options.model, options.quick)
    return figures


# -- speed ---------------------------------------------------------------------------------


def speeds(work: Path, nbytes: int) -> dict[str, float]:
    """Bytes per second of push and of pull over those of a plain copy, each kind's best round."""
    source = write_store(work / "store", nbytes)
    push(work / "store", f"file://{work}/remote", served=True)
    made = work / "made"
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: _copy(source, made / "plain"),
        "push": lambda: push(work / "store", f"file://{made}/remote", served=True),
        "pull": lambda: pull(f"file://{work}/remote", made / "here"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in tqdm(range(_ROUNDS), desc="copies", disable=None, leave=False):
        # In any order: a virtual machine's host takes back memory some time after it was freed.
        for name in order.sample(list(runs), len(runs)):
            made.mkdir()
            began = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - began)
            shutil.rmtree(made)
    size = source.stat().st_size
    for name, taken in seconds.items():
        rates = ", ".join(f"{size / each / 1e6:.0f}" for each in taken)
        print(f"{name}: {rates} MB/s")
    best = {name: min(taken) for name, taken in seconds.items()}
    return {
        "shipped_mb": size / 1e6,
        "push_speed_ratio": best["plain"] / best["push"],
        "pull_speed_ratio": best["plain"] / best["pull"],
    }


def write_store(folder: Path, nbytes: int) -> Path:
    """A datastore whose one file has about so many bytes; returns the file."""
    tokens = np.random.default_rng(0).integers(0, _VOCAB, _SEGMENT_TOKENS).astype(np.int32)
    documents = [Document(part) for part in np.array_split(tokens, _SEGMENT_TOKENS // 300)]
    segment = build_segment(documents, _VOCAB)
    # The same part again and again: sorting so much would take minutes, and copying tells no parts.
    segments = tuple(("corpus", segment) for _ in range(max(1, nbytes // segment.nbytes)))
    made = Folder(
        str(folder), vocab_size=_VOCAB, tokenizer_fingerprint="t", create=True, read_only=False
    )
    try:
        name = made.new_file_name()
        write_container(made.file_path(name), Container(_VOCAB, "t", segments))
        made.publish(add=[FileEntry(name, len(segments) * segment.num_tokens, "corpus")])
    finally:
        made.close()
    return folder / name


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- export --------------------------------------------------------------------------------


def exported(work: Path, model: str) -> dict[str, float]:
    """Drafts of answers that differ between a corpus and what its export was built into.

    Raises:
        NothingShown: the corpus hardly drafts.
    """
    with gzip.open(DATA / "gsm8k.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["answer"] for line in lines]
    held, rest = texts[:_HELD_BACK], texts[_HELD_BACK:]
    (work / "answers.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rest))
    corpus = ["--corpus", "answers"]
    built = [*corpus, "--tokenizer", model]
    command("build", work / "store", work / "answers.jsonl", *built)
    command("export", work / "store", work / "out.jsonl.gz", *corpus)
    command("build", work / "again", work / "out.jsonl.gz", "--field", "tokens", *built)
    queries = [tokens for tokens in ModelTokenizer(model).encode(held) if tokens.size > 8]
    before, after = drafts(work / "store", queries), drafts(work / "again", queries)
    drafted = sum(len(tokens) > 0 for tokens, *_ in before)
    if drafted < len(before) // 2:
        raise NothingShown(f"only {drafted} of {len(before)} queries have a draft")
    mismatches = sum(a != b for a, b in zip(before, after, strict=True))
    return {"export_drafts": len(before), "export_draft_mismatches": mismatches}


def drafts(folder: Path, queries: Sequence[np.ndarray]) -> list[tuple[list[Any], ...]]:
    """Tokens, parents and probabilities of drafts behind every eighth token of the queries."""
    found: list[tuple[list[Any], ...]] = []
    with Datastore.open(folder, create=False, read_only=True) as store:
        snapshot = store.snapshot()
        for tokens in queries:
            trie = InputTrie()
            for start in range(0, tokens.size - 8, 8):
                trie.extend(tokens[start : start + 8].tolist())
                (draft,) = retrieve([trie], snapshot, _NODES)
                found.append((draft.tokens.tolist(), draft.parents.tolist(), draft.probs.tolist()))
    return found


def command(*argv: object) -> None:
    """Runs `sglang-ext datastore ARGV`."""
    line = [sys.executable, "-m", "sglang_ext.cli", "datastore", *map(str, argv)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
