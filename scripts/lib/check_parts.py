"""Checks of several parts, of which `--parts` names some."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping

from scripts.lib.isolation_drafts import NothingShown

Part = Callable[[argparse.Namespace], dict[str, float]]


def parts_of(
    args: argparse.ArgumentParser, parts: Mapping[str, Part], default: str
) -> argparse.Namespace:
    """The options, with --parts, which must name some of `parts`."""
    args.add_argument("--parts", default=default, help="which ones [%(default)s]")
    options = args.parse_args()
    if unknown := [name for name in options.parts.split(",") if name not in parts]:
        args.error(f"--parts {','.join(unknown)}: expected some of {', '.join(parts)}")
    return options


def figures_of(
    options: argparse.Namespace, parts: Mapping[str, Part]
) -> Iterator[dict[str, float] | None]:
    """What each of the chosen parts finds; None where it could check nothing, which is told."""
    for name in options.parts.split(","):
        print(f"-- {name}", flush=True)
        try:
            yield parts[name](options)
        except NothingShown as error:
            print(f"error: {error}; this checks nothing", file=sys.stderr)
            yield None
