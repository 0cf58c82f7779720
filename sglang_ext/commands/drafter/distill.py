"""`sglang-ext drafter distill`: outputs of the target, from a server or one started for it."""

import argparse
import asyncio
import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_ext.block_drafter.distillation import (
    Distillation,
    Distilled,
    Wanted,
    default_parallel,
)
from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.held_outputs import held_file
from sglang_ext.block_drafter.state_log import folder_of, read_records
from sglang_ext.block_drafter.target_models import TargetModel, layer_to_read, load_target
from sglang_ext.request_options import RequestOptionError, check_namespace

_LEFT_OUT = 1


def run(args: argparse.Namespace) -> int:
    """Writes the file; returns the exit code (1: the server refused some sources)."""
    if args.namespace:
        try:
            check_namespace(args.namespace, "--namespace")
        except RequestOptionError as error:
            raise BlockDrafterError(str(error)) from None
    target = load_target(args.model)
    layer = _states_layer(args, target)
    wanted = Wanted(args.prompt, args.raw, args.max_tokens, args.namespace, layer)
    with held_file(args.out):
        return _distilled(args, Distillation(target, wanted, args.sources, args.out), layer)


def _distilled(args: argparse.Namespace, work: Distillation, layer: int) -> int:
    """Writes what is missing; returns the exit code."""
    if len(work.done) >= work.total:
        print(f"{args.out}: all {work.total:,} outputs are there")
        return 0
    with _server(args, layer) as url:
        totals = _written(args, work, url)
    print(f"{args.out}: {totals.outputs:,} outputs of {totals.tokens:,} tokens written")
    if layer:
        print(f"{folder_of(args.out)}: the target's states of {_recorded(args):,} outputs")
    if totals.refused:
        print(f"{totals.refused:,} sources were refused, the last: {totals.reason}")
    return _LEFT_OUT if totals.refused else 0


def _states_layer(args: argparse.Namespace, target: TargetModel) -> int:
    """Behind which layer states are recorded; 0: none are."""
    if args.states is None:
        return 0
    if args.url:
        raise BlockDrafterError("--states are recorded by a server that is started here, not --url")
    return layer_to_read(args.model, target.layers, args.states, "--states")


def _recorded(args: argparse.Namespace) -> int:
    records = read_records(folder_of(args.out))
    return 0 if records is None else len(records.places)


def _written(args: argparse.Namespace, work: Distillation, url: str) -> Distilled:
    from tqdm import tqdm

    with tqdm(
        total=work.total, initial=len(work.done), unit="output", file=sys.stderr, desc="distilling"
    ) as bar:

        def tell(totals: Distilled) -> None:
            bar.set_postfix_str(f"{totals.tokens:,} tokens", refresh=False)
            bar.update(1)

        at_once = args.parallel or default_parallel()
        return asyncio.run(work.run(url, args.api_key, at_once, tell))


@contextlib.contextmanager
def _server(args: argparse.Namespace, layer: int) -> Iterator[str]:
    """The address of a server; one that is started here is stopped too."""
    if args.url:
        parts: Any = urlsplit(args.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise BlockDrafterError(f"--url {args.url}: expected http://HOST:PORT")
        yield args.url.rstrip("/")
        return
    from sglang_ext.servers.started_server import ServerError, started

    try:
        flags = _recording(args.out, layer) if layer else []
        with started(args.model, [*flags, *shlex.split(args.serve_flags)]) as server:
            yield server.wait().url
    except ServerError as error:
        raise BlockDrafterError(str(error)) from None


def _recording(out: Path, layer: int) -> list[str]:
    """Flags of a server that records states."""
    return [
        "--speculative-algorithm", "SSSD", "--drafter", "none", "--drafters", "recorder",
        "--record-states", str(folder_of(out)), "--record-layer", str(layer),
    ]  # fmt: skip
