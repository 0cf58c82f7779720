"""The command lines of `sglang-ext datastore`, and how their errors are shown."""

import argparse
import os
import sys
from collections.abc import Callable

from sglang_ext.commands.arguments import whole_number_to
from sglang_ext.commands.datastore.shipping_subcommands import add_shipping
from sglang_ext.models import ModelError

ERROR = 2
_COUNT = whole_number_to(1 << 30)

_BUILD = """\
Build a datastore in FOLDER from one corpus: everything that the sources hold, tokenized with the
served model's tokenizer. Serve it with `sglang-ext serve --datastore FOLDER`.

Interrupt it whenever you like: the same command goes on from the last chunk that was stored.
"""
_ADD = """\
Add another corpus to the datastore in FOLDER, which no server may be using meanwhile. (A server
takes small corpora over HTTP, at /add_external_corpus.) Options are as for `build`.
"""
_SOURCES = """\
sources:
  text          one document per file; a large one becomes several, cut between paragraphs
  JSON lines    one document per line: --field names the text, the chat messages or the token ids
  parquet       one document per row, --field names the column
  Hugging Face  a folder that save_to_disk() wrote, all its splits; --field names the column
  .npy          token ids: one document per row, or a flat array
Text and JSON lines may be compressed with gzip. Folders are searched to any depth.
"""


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `datastore` to the command line. Its handlers are `args.func(args) -> exit code`.

    Exit codes: 0 done, 1 `verify` found problems, a copy lacks what is damaged, or `show` found
    nothing, 2 an error (one line), 130 interrupted.
    """
    parser = subparsers.add_parser(
        "datastore", help="build, inspect and change what SSSD drafts from"
    )
    commands = parser.add_subparsers(dest="datastore_command", metavar="COMMAND", required=True)
    for name, help, description in (
        ("build", "build a new datastore from text, tables or token files", _BUILD),
        ("add", "add another corpus to a datastore", _ADD),
    ):
        command = commands.add_parser(
            name,
            help=help,
            description=description,
            epilog=_SOURCES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_sources(command)
        _add_limits(command)
        command.set_defaults(func=_guarded(_build))
    _add_info(commands)
    _add_merge(commands)
    _add_verify(commands)
    _add_delete(commands)
    add_shipping(commands, _guarded)


def _add_info(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    info = commands.add_parser(
        "info",
        help="show what a datastore holds and what it takes",
        description="Show what a datastore holds and what it takes. A server may be using it.",
    )
    info.add_argument("folder", metavar="FOLDER")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(func=_guarded(_info))


def _add_merge(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    merge = commands.add_parser(
        "merge",
        help="copy datastores into another one",
        description="Copy all corpora and served outputs of each FOLDER into TARGET, which is "
        "created if it is not there. Namespaces of the same name are joined. All must be built "
        "with the same tokenizer, and no server may be using them.",
    )
    merge.add_argument("target", metavar="TARGET")
    merge.add_argument("folders", metavar="FOLDER", nargs="+")
    merge.set_defaults(func=_guarded(_merge))


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verify = commands.add_parser(
        "verify",
        help="check every byte of a datastore",
        description="Check all checksums, the order of all suffix arrays, and the logs. Prints "
        "one line per problem and exits with 1 if there are any. A server may be using it.",
    )
    verify.add_argument("folder", metavar="FOLDER")
    verify.set_defaults(func=_guarded(_verify))


def _add_sources(command: argparse.ArgumentParser) -> None:
    """What `build` and `add` read, and for which model."""
    command.add_argument("folder", metavar="FOLDER", help="folder of the datastore")
    command.add_argument("sources", metavar="SOURCE", nargs="+", help="files and folders to read")
    command.add_argument(
        "--tokenizer",
        required=True,
        metavar="MODEL",
        help="the model that will be served: a name of `sglang-ext models list`, a path, or a hub "
        "id. Only its tokenizer and config.json are read",
    )
    command.add_argument(
        "--vocab-size",
        type=_COUNT,
        metavar="N",
        help="the served model's vocabulary size (default: vocab_size of its config.json)",
    )
    command.add_argument("--corpus", metavar="NAME", help="its name (default: the first source's)")
    command.add_argument(
        "--format",
        choices=("auto", "text", "jsonl", "hf", "parquet", "npy"),
        default="auto",
        help="what the sources are (default: auto, by their names)",
    )
    command.add_argument(
        "--field",
        action="append",
        metavar="NAME",
        help="field or column to take; a.b is b within a; give it several times to join several "
        "with line breaks (default: text)",
    )
    command.add_argument(
        "--glob",
        metavar="PATTERN",
        help="files of folders to take, such as '*.py' or 'docs/*.md' (default: those of a known "
        "kind)",
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
    """How `build` and `add` go on, and what they take."""
    command.add_argument(
        "--skip-bad",
        action="store_true",
        help="pass over lines and rows that cannot be used, and count them",
    )
    command.add_argument(
        "--restart", action="store_true", help="begin an unfinished corpus of this name anew"
    )
    command.add_argument(
        "--chunk-tokens",
        type=_COUNT,
        default=1 << 24,
        metavar="N",
        help="tokens sorted and stored at a time: what an interruption costs, and about 30 bytes "
        "of memory each (default: %(default)s)",
    )
    command.add_argument(
        "--max-line-mb",
        type=_COUNT,
        default=32,
        metavar="MB",
        help="longest JSON line (default: %(default)s)",
    )
    command.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load .npy files of Python objects (lists of token ids); this runs code from the "
        "file, so do it only with files that you trust",
    )


def _add_delete(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    delete = commands.add_parser(
        "delete",
        help="remove a tenant's outputs, one request's output, or a corpus",
        description="Remove something from a datastore, in memory and on disk; when the command "
        "is through, it is gone. Give the FOLDER, or, while a server is using it, the server's "
        "--url.",
    )
    delete.add_argument("folder", metavar="FOLDER", nargs="?")
    what = delete.add_mutually_exclusive_group(required=True)
    what.add_argument("--namespace", metavar="NAME", help="all served outputs of a namespace")
    what.add_argument("--request", metavar="ID", help="the output of the request with this id")
    what.add_argument("--corpus", metavar="NAME", help="a corpus, finished or not")
    what.add_argument(
        "--all-unfinished", action="store_true", help="corpora whose build was interrupted"
    )
    delete.add_argument(
        "--drafters",
        metavar="DIR",
        action="append",
        default=[],
        help="with --namespace: name the trained drafters below DIR that saw its outputs",
    )
    delete.add_argument(
        "--url", metavar="URL", help="ask a running server, such as http://127.0.0.1:30000"
    )
    delete.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SGLANG_EXT_API_KEY"),
        help="the server's admin key (default: $SGLANG_EXT_API_KEY)",
    )
    delete.set_defaults(func=_guarded(_delete))


def _guarded(handler: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The handler, with errors as one line on standard error."""

    def run(args: argparse.Namespace) -> int:
        from datastores import DatastoreError

        try:
            return handler(args)
        except (DatastoreError, ModelError, OSError) as error:
            print(f"sglang-ext datastore: error: {error}", file=sys.stderr)
            return ERROR

    return run


# What the handlers need takes time to import, and the server's processes import this module too.
def _build(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.build import run

    return run(args)


def _info(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.info import run

    return run(args)


def _merge(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.maintain import merge

    return merge(args.target, args.folders)


def _verify(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.maintain import verify

    return verify(args.folder)


def _delete(args: argparse.Namespace) -> int:
    from sglang_ext.commands.datastore.delete import run

    return run(args)
