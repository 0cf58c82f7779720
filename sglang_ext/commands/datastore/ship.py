"""`sglang-ext datastore snapshot`, `push` and `pull`.

The first two step aside for a server on the same machine: cli.py, as their process begins.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from tqdm import tqdm

from datastores import DatastoreError
from datastores.shipping import Card, pull, push, read_card, snapshot_folder, write_card
from datastores.shipping.push import holds_private
from datastores.shipping.remote import is_address
from sglang_ext.commands.datastore.delete import call_server
from sglang_ext.commands.datastore.model_tokenizer import ModelTokenizer


def snapshot(args: argparse.Namespace) -> int:
    """Copies a folder; returns 1 if something of it is damaged, and so is not in the copy."""
    source, target = _source(args, args.names, "TARGET")
    with _progress("copied") as report:
        copied = snapshot_folder(source, target, report)
    again = f", {copied.rounds} rounds, as something was deleted" if copied.rounds > 1 else ""
    print(
        f"{copied.folder}: {copied.tokens:,} tokens in {copied.files} files, "
        f"{copied.nbytes / 1e6:,.1f} MB, verified{again}"
    )
    return _told(copied.problems)


def push_folder(args: argparse.Namespace) -> int:
    """Sends a folder; returns as snapshot() does."""
    source, address = _source(args, args.names, "ADDRESS")
    served = _with_served(args, source)
    card = _card(args, source)
    if os.path.sep in card.tokenizer and os.path.exists(card.tokenizer):
        card = replace(card, tokenizer=os.path.basename(os.path.abspath(card.tokenizer)))
    with _progress("sent") as report:
        pushed = push(
            source, address, served=served, card=card, report=report, timeout=args.timeout
        )
    print(
        f"{pushed.address}: {pushed.tokens:,} tokens, {pushed.nbytes / 1e6:,.1f} MB, "
        f"{pushed.sent / 1e6:,.1f} MB of it sent"
    )
    return _told(pushed.problems)


def pull_folder(args: argparse.Namespace) -> int:
    """Fetches a folder; returns the exit code."""
    if not is_address(args.address) and not os.path.isdir(args.address):
        raise DatastoreError(f"{args.address} is neither an address (s3://...) nor a folder")
    fingerprint = None
    if args.tokenizer is not None:
        fingerprint = ModelTokenizer(args.tokenizer, vocab_size=1).fingerprint
    with _progress("received") as report:
        pulled = pull(
            args.address,
            args.folder,
            tokenizer_fingerprint=fingerprint,
            report=report,
            timeout=args.timeout,
        )
    new = f"{pulled.received / 1e6:,.1f} MB received" if pulled.received else "it was here already"
    print(f"{pulled.folder}: {pulled.tokens:,} tokens, {pulled.nbytes / 1e6:,.1f} MB, {new}")
    return 0


def _source(args: argparse.Namespace, names: list[str], last: str) -> tuple[str, str]:
    """(the folder, what else was named): FOLDER X, or X of a server's folder with --url."""
    if len(names) != (1 if args.url else 2):
        expected = f"--url URL {last}" if args.url else f"FOLDER {last}, or --url URL {last}"
        raise DatastoreError(f"expected {expected}")
    if not args.url:
        return names[0], names[1]
    info = call_server(args, "GET", "/datastore")
    ranks = info.get("ranks", [info])
    paths = {rank.get("path") for rank in ranks}
    if len(paths) != 1:
        raise DatastoreError(f"the server at {args.url} has several datastores: name a FOLDER")
    (path,) = paths
    if path is None:
        raise DatastoreError(
            f"the server at {args.url} keeps its datastore in memory: start it with --datastore"
        )
    if not os.path.isdir(path):
        raise DatastoreError(f"the server's folder {path} is not on this machine: run this there")
    return path, names[0]


def _with_served(args: argparse.Namespace, folder: str) -> bool:
    """Whether tenants' texts go along. DatastoreError where there are any and it was not said."""
    if args.with_served or args.corpora_only:
        return args.with_served
    namespaces, corpora = holds_private(folder)
    if namespaces or corpora:
        raise DatastoreError(
            f"{folder} holds served outputs of {namespaces} namespaces and {corpora} corpora of "
            "namespaces, which whoever reads the address can read: say --corpora-only to leave "
            "them here, or --with-served to send them"
        )
    return True


def _card(args: argparse.Namespace, folder: str) -> Card:
    """The folder's card with what the flags say, which is kept there for the next time."""
    card = read_card(folder)
    said = {
        name: getattr(args, name)
        for name in ("tokenizer", "licence", "description")
        if getattr(args, name) is not None
    }
    sources = dict(card.sources)
    for given in args.source:
        corpus, mark, text = given.partition("=")
        if not mark or not corpus or not text:
            raise DatastoreError(f"--source {given}: expected CORPUS=TEXT")
        sources[corpus] = tuple(dict.fromkeys((*sources.get(corpus, ()), text)))
    changed = replace(card, **said, sources=sources)
    if changed != card:
        write_card(folder, changed)
    return changed


def _told(problems: tuple[str, ...]) -> int:
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    return 1 if problems else 0


@contextlib.contextmanager
def _progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on a terminal."""
    with tqdm(desc=doing, unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
