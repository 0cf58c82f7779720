"""Values of flags, for argparse's `type`: each says in one line what it expected instead.

All raise argparse.ArgumentTypeError where a value is wrong.
"""

import argparse
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

Number = TypeVar("Number", int, float)


def whole_number(text: str) -> int:
    """A whole number from 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def whole_number_to(most: int) -> Callable[[str], int]:
    """Reads a whole number from 1 to `most`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {most}")
        return int(text)

    return parse


port = whole_number_to(65535)


def switch(text: str) -> bool:
    """0 or 1."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 or 1")
    return text == "1"


def minutes(text: str) -> float:
    """A number of minutes, 0 for no limit."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of minutes, 0 for no limit")
    return number


def numbers(kind: type[Number]) -> Callable[[str], tuple[Number, ...]]:
    """Reads different numbers above 0, comma-separated; none where the text is blank."""

    def parse(text: str) -> tuple[Number, ...]:
        try:
            found = tuple(kind(part) for part in text.split(",")) if text.strip() else ()
        except ValueError:
            found = (kind(0),)
        if len(set(found)) < len(found) or not all(0 < n < float("inf") for n in found):
            what = "whole numbers from 1" if kind is int else "numbers above 0"
            raise argparse.ArgumentTypeError(f"{text!r}: expected different {what}, as 1,2,4")
        return found

    return parse


def names(text: str) -> tuple[str, ...]:
    """Different names, comma-separated."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected different names, comma-separated")
    return found


def named_url(text: str) -> tuple[str, str]:
    """NAME=http://HOST:PORT, as a name and an address without a slash at its end."""
    name, _, url = text.partition("=")
    parts = urlsplit(url)
    if not name or parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=http://HOST:PORT")
    return name, url.rstrip("/")
