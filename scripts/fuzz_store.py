"""Datastore folders that are wrong in every way: refused with a reason, or serving what is right.

A round takes a small folder that is right, damages it (flipped bits, cuts, splices, at any file) or
writes wrong content under valid checksums, odd names, links and special files, and then checks,
opens, follows, searches, folds, deletes from and closes it. What it gives must be documents that
were put in, under their namespace; all else must be a DatastoreError. With --seed the number of a
round makes it: --offset goes on where a run was ended, `--offset N --rounds 1` does one again.

At last an output holds whole log records (another tenant's document, a deletion of everything),
of every format, and the log is cut at each byte: none may be taken (smuggled_records).

    python -m scripts.fuzz_store [--rounds 10000] [--seed 0] [--offset 0] [--quick] [--json FILE]
"""

import logging
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

import datastores.durable
import datastores.merging
from datastores import (
    Datastore,
    DatastoreError,
    InputTrie,
    RetrievalConfig,
    check_folder,
    retrieve,
    verify_folder,
)
from datastores.durable import DurableOptions
from datastores.folder import Folder
from datastores.folding import FoldJob, run_job
from datastores.following import FollowingCollection
from datastores.logs import LogOptions
from datastores.segment import document_lengths
from scripts.lib.figures import parser, report
from scripts.lib.store_mutations import CLASSES, FINGERPRINT, VOCAB, Known, mutate, templates
from scripts.lib.store_smuggling import smuggled

QUICK_ROUNDS = 500
_WAIT_S = 20.0
_QUERY = [1, 2, 3]


def main() -> int:
    made = parser(__doc__, model=False)
    made.add_argument("--rounds", type=int, help=f"[10000, with --quick {QUICK_ROUNDS}]")
    made.add_argument("--seed", type=int, default=0, help="of all rounds [%(default)s]")
    made.add_argument("--offset", type=int, default=0, help="number of the first [%(default)s]")
    options = made.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else 10_000)
    logging.disable(logging.CRITICAL)
    figures = dict(fuzz(options.seed, options.offset, rounds))
    cut_points, taken = smuggled(every=7 if options.quick else 1)
    figures |= {"cut_points": cut_points, "smuggled_records": taken}
    report(figures, options.json)
    bad = ("wrong_data_accepted", "uncaught", "smuggled_records")
    return 1 if any(figures[name] for name in bad) else 0


def fuzz(seed: int, offset: int, rounds: int) -> "Counter[str]":
    """How many rounds ended in which way."""
    counts = Counter(rounds=0, served=0, refused=0, wrong_data_accepted=0, uncaught=0)
    # In this process, so that what a job does not survive is seen.
    datastores.durable.FoldWorker = datastores.merging.FoldWorker = InlineWorker  # type: ignore
    with tempfile.TemporaryDirectory(prefix="fuzz-store-") as folder:
        made = templates(Path(folder) / "templates")
        for number in tqdm(range(offset, offset + rounds), unit="round", disable=None):
            rng = np.random.default_rng((seed, number))
            kind = CLASSES[number % len(CLASSES)]
            template, known = made[int(rng.integers(len(made)))]
            path = Path(folder) / "round"
            shutil.copytree(template, path)
            try:
                ending = one_round(path, known, kind, rng)
            except Exception:
                ending = "uncaught"
                traceback.print_exc()
            counts["rounds"] += 1
            counts[ending] += 1
            if ending in ("uncaught", "wrong_data_accepted"):
                print(f"{ending}: --seed {seed} --offset {number} ({kind})", file=sys.stderr)
            if not known.outside.exists():
                counts["wrong_data_accepted"] += 1
                print(f"a file outside is gone: --offset {number} ({kind})", file=sys.stderr)
                known.outside.write_text("precious")
            shutil.rmtree(path)
    return counts


def one_round(path: Path, known: Known, kind: str, rng: np.random.Generator) -> str:
    """served, refused or wrong_data_accepted; raises what a datastore must not raise."""
    follower = _Follower(path)
    mutate(path, known, kind, rng)
    right = follower.looks(known)
    endings = [_refuses(lambda: check_folder(path, FINGERPRINT))]
    verify_folder(path)
    for options in ({"read_only": True}, {"shared": True}):
        store = None
        try:
            store = Datastore.open(
                path,
                vocab_size=VOCAB,
                tokenizer_fingerprint=FINGERPRINT,
                live_interval=0.0,
                **options,
            )
            right &= _serves_right(store, known)
            if "shared" in options:
                right &= _maintained(store, known)
            endings.append(False)
        except DatastoreError:
            endings.append(True)
        finally:
            if store is not None:
                store.close()
    if not right:
        return "wrong_data_accepted"
    return "refused" if any(endings) else "served"


def _maintained(store: Datastore, known: Known) -> bool:
    """Adds, folds and deletes; whether what is found afterwards is right."""
    document = tuple(range(40, 60))
    added = store.add(document, namespace="new", name="new")
    _refuses(lambda: store.fold(_WAIT_S))
    grown = known.with_document("new", document) if added else known
    right = _serves_right(store, grown)
    if not _refuses(lambda: store.delete_namespace("a")):
        right &= "a" not in store.namespaces()
    return right and _serves_right(store, grown)


def _serves_right(store: Datastore, known: Known) -> bool:
    store.info()
    for namespace in {*store.namespaces(), "a", "b"}:
        snapshot = store.snapshot(namespace)
        trie = InputTrie()
        trie.extend(_QUERY)
        (draft,) = retrieve([trie], snapshot, 20, RetrievalConfig(max_input_samples=0))
        if not set(draft.tokens.tolist()) <= set(range(VOCAB)):
            return False
        if not all(known.has(namespace, d) for s in snapshot.live for d in _documents(s)):
            return False
        if not all(known.has_text(d) for s in snapshot.static for d in _documents(s)):
            return False
    return True


def _documents(segment) -> list[tuple[int, ...]]:
    ends = np.cumsum(document_lengths(segment))
    return [
        tuple(segment.tokens[int(start) : int(end) - 1].tolist())
        for start, end in zip(segment.documents["start"], ends, strict=True)
    ]


def _refuses(call) -> bool:
    """Whether it raises a DatastoreError."""
    try:
        call()
    except DatastoreError:
        return True
    return False


class _Follower:
    """Follows a folder from before it is damaged on."""

    def __init__(self, path: Path) -> None:
        self._folder = Folder(
            str(path),
            vocab_size=VOCAB,
            tokenizer_fingerprint=FINGERPRINT,
            create=False,
            read_only=True,
        )
        self._following = FollowingCollection(
            self._folder,
            DurableOptions(1 << 30, LogOptions(1 << 20, 0.0)),
            lambda: None,
            lambda: False,
        )

    def looks(self, known: Known) -> bool:
        """Whether it finds only what is right after the damage; ends it."""
        following = self._following
        _refuses(lambda: following.flush(_WAIT_S))
        right = all(
            known.has(namespace, document)
            for namespace in following.namespaces()
            for segment in following.segments_of(namespace)
            for document in _documents(segment)
        )
        following.close()
        self._folder.close()
        return right


class InlineWorker:
    """Stands for FoldWorker: jobs run in the thread that asks."""

    def __init__(self) -> None:
        self._closed = False

    def run(self, job: FoldJob) -> int:
        if self._closed:
            raise DatastoreError("the datastore is closed")
        return run_job(FoldJob.from_json(job.to_json()))

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True


if __name__ == "__main__":
    sys.exit(main())
