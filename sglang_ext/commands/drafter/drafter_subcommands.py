"""The command lines of `sglang-ext drafter`, and how their errors are shown."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_ext.block_drafter.drafter_manifest import BlockDrafterError
from sglang_ext.block_drafter.recipes import LoopRecipe, Recipe, StreamRecipe
from sglang_ext.block_drafter.shapes import SHAPES
from sglang_ext.commands.arguments import minutes, names, whole_number

ERROR = 2
# By --kind; options that are not given are these fields.
RECIPES: dict[str, LoopRecipe] = {"block": Recipe(), "streaming": StreamRecipe()}
_TARGET_HELP = "the target: a name of `sglang-ext models list`, a path or a hub id"

_DISTILL = """\
Have the target write the outputs that a drafter is to learn from, greedily, one for each source.
Interrupt it whenever you like: the same command goes on with what is missing.
"""
_TRAIN = """\
Train a block drafter (SpecDec) on what a target wrote: a file of `drafter distill`, or the served
outputs of a datastore. It ends when held-out outputs are drafted no better. Interrupt it whenever
you like: the same command goes on from the last state, at most a minute back.

With --kind streaming, train lookahead streams of Mirror's draft model (--draft-model) instead, on
the same data; --out holds the best so far after each evaluation.
"""


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `drafter` to the command line. Its handlers are `args.func(args) -> exit code`.

    Exit codes: 0 done, 1 `distill` left sources out, 2 an error (one line), 130 interrupted.
    """
    parser = subparsers.add_parser("drafter", help="train and inspect SpecDec's block drafters")
    commands = parser.add_subparsers(dest="drafter_command", metavar="COMMAND", required=True)
    _add_distill(commands)
    _add_train(commands)
    score = commands.add_parser(
        "eval",
        help="accepted tokens a step on known outputs, by k",
        description="Replay outputs of the target with a drafter: how many tokens a step commits, "
        "by the number k of tokens drafted.",
    )
    score.add_argument("folder", metavar="DIR", type=Path)
    score.add_argument("--data", metavar="FILE", type=Path, required=True, help="as for `train`")
    score.add_argument("--model", metavar="TARGET", required=True, help=_TARGET_HELP)
    score.add_argument("--most", type=whole_number, default=500, help="outputs [%(default)d]")
    score.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    score.add_argument("--json", action="store_true", help="print one JSON object")
    score.set_defaults(func=_guarded(_score))
    _add_show(commands)


def _add_show(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    show = commands.add_parser("show", help="what a drafter is, and what it was trained on")
    show.add_argument("folder", metavar="DIR", type=Path)
    show.add_argument("--json", action="store_true", help="print one JSON object")
    show.set_defaults(func=_guarded(_show))
    listed = commands.add_parser(
        "list",
        help="drafters of some folders, and which of them saw a tenant's data",
        description="One line a drafter. With --saw, only those that were trained on outputs of "
        "a namespace: what is deleted from a datastore stays in what has learned from it.",
    )
    listed.add_argument(
        "folders", metavar="DIR", nargs="+", type=Path, help="searched to any depth"
    )
    listed.add_argument("--saw", metavar="NAMESPACE", help="trained on its outputs")
    listed.set_defaults(func=_guarded(_list))


def _add_distill(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    distill = commands.add_parser(
        "distill",
        help="have the target write what a drafter learns from",
        description=_DISTILL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    distill.add_argument(
        "--sources",
        metavar="FILE",
        type=Path,
        required=True,
        help="a source a line, or JSON lines with the field `source` (.jsonl); .gz is unpacked",
    )
    distill.add_argument("--model", metavar="TARGET", required=True, help=_TARGET_HELP)
    distill.add_argument(
        "--url", metavar="URL", help="a server of it, http://HOST:PORT; default: one is started"
    )
    distill.add_argument("--serve-flags", default="", help="further flags of the one that starts")
    distill.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSON lines")
    distill.add_argument("--prompt", default="{source}", help="text around a source [%(default)s]")
    distill.add_argument("--raw", action="store_true", help="without the chat template")
    distill.add_argument(
        "--max-tokens", type=whole_number, default=256, help="of an output [%(default)d]"
    )
    distill.add_argument(
        "--states",
        metavar="LAYER",
        type=int,
        nargs="?",
        const=0,
        help="record the target's states too, in FILE.states, for `train --encoder target`, which "
        "then reads nothing [behind two thirds of its layers]",
    )
    distill.add_argument(
        "--parallel", type=whole_number, help="outputs at once [8 for each processor]"
    )
    distill.add_argument(
        "--namespace",
        default="",
        help="whose outputs these are; default: nobody's, and the server's datastore keeps none",
    )
    distill.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SGLANG_EXT_API_KEY", ""),
        help="the server's key (default: $SGLANG_EXT_API_KEY)",
    )
    distill.set_defaults(func=_guarded(_distill))


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    train = commands.add_parser(
        "train",
        help="train a block drafter",
        description=_TRAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("--kind", choices=tuple(RECIPES), default="block")
    what = train.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--data", metavar="FILE", type=Path, nargs="+", help="written by `drafter distill`"
    )
    what.add_argument("--datastore", metavar="FOLDER", help="a server may be using it")
    train.add_argument(
        "--namespaces", type=names, default=(), help="of the datastore, as a,b [all of them]"
    )
    train.add_argument(
        "--held-out",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=(),
        help="outputs by which it is judged, as --data; their sources are not learned from "
        "[2%% of the data]",
    )
    train.add_argument("--model", metavar="TARGET", required=True, help=_TARGET_HELP)
    train.add_argument("--out", metavar="DIR", type=Path, required=True)
    train.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    train.add_argument(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="of products; auto: bf16 where the device is faster in it [%(default)s]",
    )
    _add_network(train)
    train.add_argument(
        "--most-tokens",
        type=whole_number,
        default=20_000_000,
        help="of the data, about 30 bytes of memory each [%(default)d]",
    )
    _add_streaming(train)
    _add_recipe(train)
    train.set_defaults(func=_guarded(_train))


def _add_network(train: argparse.ArgumentParser) -> None:
    """What a block drafter is made of."""
    train.add_argument("--shape", choices=tuple(SHAPES), default="small", help="[%(default)s]")
    train.add_argument(
        "--encoder",
        choices=("own", "target"),
        default="own",
        help="who reads a source: layers of the drafter, or the target itself, whose states the "
        "drafter takes [%(default)s]",
    )
    train.add_argument(
        "--encoder-layer",
        type=whole_number,
        default=0,
        help="behind so many layers of the target [two thirds of them]",
    )
    train.add_argument("--block", type=whole_number, default=10, help="k [%(default)d]")
    train.add_argument(
        "--outputs", type=whole_number, default=8000, help="tokens it can draft [%(default)d]"
    )
    train.add_argument(
        "--source-tokens", type=whole_number, default=256, help="of a source [%(default)d]"
    )


def _add_streaming(train: argparse.ArgumentParser) -> None:
    """What only lookahead streams need."""
    streaming = train.add_argument_group("with --kind streaming")
    streaming.add_argument(
        "--draft-model", metavar="NAME", default="", help="a folder or a known name"
    )
    streaming.add_argument(
        "--streams", type=whole_number, default=3, help="tokens looked ahead [%(default)d]"
    )
    streaming.add_argument(
        "--rank", type=whole_number, default=16, help="of the changes of matrices [%(default)d]"
    )


def _add_recipe(train: argparse.ArgumentParser) -> None:
    """How long and how fast it learns."""

    def add(name: str, kind: Callable[[str], float], text: str, metavar: str | None = None) -> None:
        field = name[2:].replace("-", "_")
        defaults = {k: getattr(recipe, field, None) for k, recipe in RECIPES.items()}
        shown = ", ".join(f"{k} {value:g}" for k, value in defaults.items() if value is not None)
        train.add_argument(name, type=kind, help=f"{text} [{shown}]", metavar=metavar)

    add("--steps", whole_number, "most")
    add("--minutes", minutes, "most, in all; 0: no limit")
    add("--batch", whole_number, "outputs in a step")
    add("--learning-rate", float, "the highest")
    add("--warmup", whole_number, "steps")
    add("--dropout", float, "of layers")
    wrong = "of the tokens that a first pass of a block drafter gets wrong, so many are shown"
    add("--glancing", float, wrong, metavar="PART")
    add("--evaluate", whole_number, "every so many steps")
    add("--patience", whole_number, "evaluations without a better one that end it")
    add("--seed", whole_number, "of what is drawn")


def _guarded(handler: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The handler, with errors as one line on standard error."""

    def run(args: argparse.Namespace) -> int:
        try:
            return handler(args)
        except (BlockDrafterError, OSError) as error:
            print(f"sglang-ext drafter: error: {error}", file=sys.stderr)
            return ERROR

    return run


# What the handlers need takes time to import, and the server's processes import this module too.
def _distill(args: argparse.Namespace) -> int:
    from sglang_ext.commands.drafter.distill import run

    return run(args)


def _train(args: argparse.Namespace) -> int:
    if args.kind == "streaming":
        from sglang_ext.commands.drafter.train_streams import run as run_streams

        return run_streams(args)
    from sglang_ext.commands.drafter.train_drafter import run

    return run(args)


def _score(args: argparse.Namespace) -> int:
    from sglang_ext.commands.drafter.score_drafter import run

    return run(args)


def _show(args: argparse.Namespace) -> int:
    from sglang_ext.commands.drafter.show_drafter import show

    return show(args.folder, args.json)


def _list(args: argparse.Namespace) -> int:
    from sglang_ext.commands.drafter.show_drafter import list_drafters

    return list_drafters(args.folders, args.saw)
