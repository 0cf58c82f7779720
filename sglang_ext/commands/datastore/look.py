"""`sglang-ext datastore show` and `export`: what a folder holds, while a server may be using it."""

import argparse
import contextlib
import gzip
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

from datastores import DatastoreError
from datastores.continuations import Continuations, continuations_of
from datastores.corpus_names import namespace_and_name, shown_name
from datastores.files import replace_file
from datastores.manifest import Manifest, check_same_tokenizer
from datastores.segment import Segment, documents_of
from datastores.shipping import read_card
from datastores.shipping.cut import Cut
from sglang_ext.commands.datastore.model_tokenizer import ModelTokenizer


def show(args: argparse.Namespace) -> int:
    """Prints what follows a prefix; returns 1 if nothing does."""
    with Cut(args.folder) as cut:
        tokenizer = _tokenizer(args.folder, args.tokenizer, cut.manifest)
        assert tokenizer is not None
        if not args.prefix:
            raise DatastoreError("--prefix must be a text, and not empty")
        prefix, found = _found(args, cut, tokenizer)
    if args.json:
        print(json.dumps(_as_json(found, prefix, tokenizer), ensure_ascii=False))
    else:
        print("\n".join(_lines(found, prefix, tokenizer)))
    return 0 if found.matched else 1


def _found(
    args: argparse.Namespace, cut: Cut, tokenizer: ModelTokenizer
) -> tuple[list[int], Continuations]:
    """(the prefix's tokens, what follows them): as at a text's beginning, or behind a space, which
    most tokenizers tell apart; whichever of the two is found at greater length, or more often."""
    segments = list(_chosen(args, cut))
    both = [tokens.tolist() for tokens in tokenizer.encode([args.prefix, " " + args.prefix])]
    found = [
        (prefix, continuations_of(prefix, segments, tokenizer.vocab_size, args.tokens, args.most))
        for prefix in both
    ]
    return max(found, key=lambda each: (each[1].matched, each[1].sources.total()))


def export(args: argparse.Namespace) -> int:
    """Writes each document as a line; returns the exit code."""
    with Cut(args.folder) as cut:
        tokenizer = None
        if args.tokenizer is not None:
            tokenizer = _tokenizer(args.folder, args.tokenizer, cut.manifest)
        segments = _chosen(args, cut, keys=True)
        with _output(args.file) as file:
            documents = tokens = 0
            for line, size in _documents(segments, tokenizer):
                file.write(line)
                documents, tokens = documents + 1, tokens + size
        problems = cut.problems
    print(f"{args.file}: {documents:,} documents, {tokens:,} tokens", file=sys.stderr)
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _tokenizer(folder: str, name: str | None, manifest: Manifest) -> ModelTokenizer:
    """The named tokenizer, or the card's. DatastoreError if it is not the folder's."""
    name = name or read_card(folder).tokenizer
    if not name:
        raise DatastoreError(f"{folder} does not say its tokenizer: name the model, --tokenizer")
    tokenizer = ModelTokenizer(name, manifest.vocab_size)
    check_same_tokenizer(folder, manifest, None, tokenizer.fingerprint)
    return tokenizer


def _chosen(
    args: argparse.Namespace, cut: Cut, keys: bool = False
) -> Iterator[tuple[str, Segment]]:
    """(source, sub-index) of the corpora and namespaces that args name, of all if they name none.

    keys: the source as a corpus's key behind "c", a namespace behind "n"; else for people.
    Raises DatastoreError: what they name is not there.
    """
    corpora, namespaces = set(args.corpus), set(args.namespace)
    everything = not corpora and not namespaces
    missing = {("corpus", c) for c in corpora} | {("namespace", n) for n in namespaces}
    for owner, corpus, segment in cut.segments():
        kind, name = ("namespace", owner) if corpus is None else ("corpus", shown_name(corpus))
        missing.discard((kind, name))
        if everything or name in (namespaces if corpus is None else corpora):
            yield (kind[0] + (corpus or owner) if keys else f"{kind} {name!r}", segment)
    for kind, name in sorted(missing):
        raise DatastoreError(f"there is no {kind} {name!r} in {cut.path}")


# -- show ----------------------------------------------------------------------------------


def _as_json(
    found: Continuations, prefix: Sequence[int], tokenizer: ModelTokenizer
) -> dict[str, Any]:
    return {
        "matched": tokenizer.decode(prefix[len(prefix) - found.matched :]),
        "matched_tokens": found.matched,
        "occurrences": sum(found.sources.values()),
        "sampled": found.sampled,
        "sources": dict(found.sources),
        "continuations": [
            {
                "text": tokenizer.decode(each.tokens),
                "tokens": list(each.tokens),
                "count": each.count,
                "sources": each.sources,
            }
            for each in found.found
        ],
    }


def _lines(found: Continuations, prefix: Sequence[int], tokenizer: ModelTokenizer) -> Iterator[str]:
    if not found.matched:
        yield "not found, not even its last token"
        return
    matched = tokenizer.decode(prefix[len(prefix) - found.matched :])
    total = sum(found.sources.values())
    where = ", ".join(f"{count:,} in {source}" for source, count in found.sources.most_common())
    yield f"{matched!r} ({found.matched} of {len(prefix)} tokens): {total:,} times, {where}"
    if found.sampled:
        yield "(so often that not all were looked at: counts are of those that were)"
    for each in found.found:
        sources = ", ".join(each.sources)
        yield f"{each.count:>8,}  {tokenizer.decode(each.tokens)!r}  {sources}"


# -- export --------------------------------------------------------------------------------


def _documents(
    segments: Iterator[tuple[str, Segment]], tokenizer: ModelTokenizer | None
) -> Iterator[tuple[str, int]]:
    """(a JSON line, its tokens) of each document."""
    for source, segment in segments:
        namespace, corpus = (
            namespace_and_name(source[1:]) if source[0] == "c" else (source[1:], None)
        )
        for document in documents_of(segment):
            tokens = document.tokens.tolist()
            line: dict[str, Any] = {"corpus": corpus, "namespace": namespace, "tokens": tokens}
            if tokenizer is not None:
                line["text"] = tokenizer.decode(tokens)
            yield json.dumps(line, ensure_ascii=False) + "\n", len(tokens)


@contextlib.contextmanager
def _output(path: str) -> Iterator[IO[str]]:
    """The file to write to, which is there whole or not at all; `-`: standard output."""
    if path == "-":
        yield sys.stdout
        return
    if os.path.isdir(path):
        raise DatastoreError(f"{path} must be a file, and is a folder")
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(replace_file(path))
        if path.endswith(".gz"):
            file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        # Half a surrogate pair may come of decoding what is no whole text.
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n")
        yield text
        text.flush()
        text.detach()
