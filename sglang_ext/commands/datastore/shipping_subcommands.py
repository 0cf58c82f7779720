"""The command lines of `sglang-ext datastore snapshot | push | pull | show | export`."""

import argparse
import os
from collections.abc import Callable
from typing import TypeAlias

from sglang_ext.commands.arguments import whole_number_to

Handler = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_ADDRESS = """\
An ADDRESS is anything that fsspec knows: s3://bucket/folder, gs://..., sftp://..., file:///..., or
hf://OWNER/NAME, a dataset on Hugging Face's Hub. Credentials come from where its file system looks
for them (AWS_PROFILE, HF_TOKEN, ...). Some kinds need a package of their own (s3fs, gcsfs).
"""
_SNAPSHOT = """\
Copy the datastore in FOLDER to the new folder TARGET, as of one moment, and verify the copy. A
server may be using FOLDER; with --url it is the folder of that server, on this machine, with all
that it has answered. What is deleted meanwhile is not in the copy. Interrupted, the same command
goes on.
"""
_PUSH = """\
Put the datastore in FOLDER to an ADDRESS, in place of the one that is there, with a README.md and
a checksum of every block. A server may be using FOLDER. Interrupted, the same command goes on.
"""
_PULL = """\
Bring the datastore at an ADDRESS to the new folder FOLDER, every block checked. Interrupted, the
same command goes on. `sglang-ext serve --datastore ADDRESS` does it by itself.
"""
_SHOW = """\
Show what follows a text in a datastore: the longest end of it (12 tokens at most) that occurs, its
continuations with their counts, and where they are from. A server may be using FOLDER.
"""
_EXPORT = """\
Write the documents of a datastore as JSON lines: corpus or namespace, token ids, and with
--tokenizer their text. `datastore build FOLDER FILE --field tokens` makes a datastore of them
again. A server may be using FOLDER.
"""


def add_shipping(commands: Commands, guarded: Callable[[Handler], Handler]) -> None:
    """Adds them. guarded: makes one line of a handler's errors."""
    snapshot = _added(commands, "snapshot", "copy a datastore that a server uses", _SNAPSHOT)
    snapshot.add_argument("names", metavar="FOLDER TARGET", nargs="+")
    _add_server(snapshot)
    snapshot.set_defaults(func=guarded(_snapshot))

    push = _added(commands, "push", "send a datastore to an address (s3, hf, ...)", _PUSH, _ADDRESS)
    push.add_argument("names", metavar="FOLDER ADDRESS", nargs="+")
    what = push.add_mutually_exclusive_group()
    what.add_argument(
        "--corpora-only",
        action="store_true",
        help="leave served outputs and namespaces' corpora here",
    )
    what.add_argument(
        "--with-served",
        action="store_true",
        help="send them: whoever can read the address can read what tenants wrote",
    )
    push.add_argument("--tokenizer", metavar="MODEL", help="for the card: the model it is for")
    push.add_argument("--licence", "--license", metavar="NAME", help="for the card: of the texts")
    push.add_argument("--description", metavar="TEXT", help="for the card: what it is")
    push.add_argument(
        "--source",
        metavar="CORPUS=TEXT",
        action="append",
        default=[],
        help="for the card: what a corpus was made of; may be given several times",
    )
    _add_timeout(push)
    _add_server(push)
    push.set_defaults(func=guarded(_push))

    pull = _added(commands, "pull", "fetch a datastore from an address", _PULL, _ADDRESS)
    pull.add_argument("address", metavar="ADDRESS")
    pull.add_argument("folder", metavar="FOLDER")
    pull.add_argument(
        "--tokenizer", metavar="MODEL", help="refuse one that was built for another model's"
    )
    _add_timeout(pull)
    pull.set_defaults(func=guarded(_pull))
    _add_looks(commands, guarded)


def _add_looks(commands: Commands, guarded: Callable[[Handler], Handler]) -> None:
    show = _added(commands, "show", "show what follows a text in a datastore", _SHOW)
    show.add_argument("folder", metavar="FOLDER")
    show.add_argument("--prefix", metavar="TEXT", required=True, help="what to look for")
    show.add_argument(
        "--tokens",
        metavar="N",
        type=whole_number_to(64),
        default=8,
        help="length of a continuation [%(default)s]",
    )
    show.add_argument(
        "--most",
        metavar="N",
        type=whole_number_to(10_000),
        default=10,
        help="continuations to show [%(default)s]",
    )
    show.add_argument("--json", action="store_true", help="print one JSON object")
    _add_choice(show, "the model it is for (default: the one that the datastore's card names)")
    show.set_defaults(func=guarded(_show))

    export = _added(commands, "export", "write a datastore's documents as JSON lines", _EXPORT)
    export.add_argument("folder", metavar="FOLDER")
    export.add_argument("file", metavar="FILE", help="FILE.jsonl, FILE.jsonl.gz, or - to print")
    _add_choice(export, "the model it is for; adds each document's text")
    export.set_defaults(func=guarded(_export))


def _added(
    commands: Commands, name: str, help: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_choice(command: argparse.ArgumentParser, tokenizer_help: str) -> None:
    for flag, what in (("--corpus", "corpus"), ("--namespace", "namespace's served outputs")):
        command.add_argument(
            flag,
            metavar="NAME",
            action="append",
            default=[],
            help=f"this {what} only; may be given several times",
        )
    command.add_argument("--tokenizer", metavar="MODEL", help=tokenizer_help)


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", metavar="URL", help="the folder of a running server, http://127.0.0.1:30000"
    )
    command.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SGLANG_EXT_API_KEY"),
        help="the server's admin key (default: $SGLANG_EXT_API_KEY)",
    )


def _add_timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=whole_number_to(3600),
        default=60,
        help="how long the address may take to answer; a block five times as long [%(default)s]",
    )


def _snapshot(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.ship import snapshot

    return snapshot(args)


def _push(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.ship import push_folder

    return push_folder(args)


def _pull(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.ship import pull_folder

    return pull_folder(args)


def _show(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.look import show

    return show(args)


def _export(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.look import export

    return export(args)
