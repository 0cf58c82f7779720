"""Bounds on regular expressions and grammars, whose cost their length does not show."""

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parse  # type: ignore[import-not-found]
from typing import Any

from sglang_ext.admission.errors import AdmissionError

# A tail of this many characters is searched at every decode step.
_TEXT = 4096
_MOST_WAYS = _TEXT
_DEEPEST = 64
_LONGEST_GRAMMAR = 64 << 10
_OPENING, _CLOSING = "([{", ")]}"


def check_stop_regex(pattern: str) -> None:
    """Refuse what may backtrack for minutes: Python's `re` runs in the scheduler's loop.

    The ways in which a pattern can match at one place are counted, an unbounded repetition of one
    character as 4096 ways; more ways than that are refused. So one `.*` may be there, or
    repetitions with small bounds, but no `.*.*` and no `(a+)+`.

    Raises:
        AdmissionError: it is no regular expression, or there are too many ways.
    """
    try:
        ways = _ways(sre_parse.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise AdmissionError(f"stop_regex is no regular expression: {error}") from None
    if ways > _MOST_WAYS:
        raise AdmissionError(
            "stop_regex may backtrack for too long: have one unbounded repetition (* or +) at "
            "most, none inside another, and no backreference; write small bounds such as {0,8}"
        )


def _ways(parsed: Any) -> int:
    ways = 1
    for token, value in parsed:
        ways = min(ways * _ways_of(token, value), _MOST_WAYS + 1)
    return ways


def _ways_of(token: Any, value: Any) -> int:
    if token in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        low, high, inner = value
        most = _TEXT if high is sre.MAXREPEAT else int(high)
        each = _ways(inner)
        if each == 1:
            return most - min(int(low), most) + 1 if high is not sre.MAXREPEAT else _TEXT
        return _MOST_WAYS + 1 if most > 12 else each**most
    if token is sre.SUBPATTERN:
        return _ways(value[3])
    if token is sre.ATOMIC_GROUP:
        return _ways(value)
    if token is sre.BRANCH:
        return sum(_ways(branch) for branch in value[1])
    if token in (sre.ASSERT, sre.ASSERT_NOT):
        return _ways(value[1])
    if token in (sre.GROUPREF, sre.GROUPREF_IGNORE, sre.GROUPREF_EXISTS):
        return _MOST_WAYS + 1
    return 1


def check_grammar(field: str, text: str) -> None:
    """Refuse grammars that a compiler would need too much stack or time for.

    Args:
        field: json_schema, regex, ebnf or structural_tag.

    Raises:
        AdmissionError: it is longer than 64 KiB, or nested deeper than 64.
    """
    if len(text.encode(errors="replace")) > _LONGEST_GRAMMAR:
        raise AdmissionError(f"{field} is longer than {_LONGEST_GRAMMAR} bytes")
    if _depth(text) > _DEEPEST:
        raise AdmissionError(f"{field} is nested deeper than {_DEEPEST}")


def _depth(text: str) -> int:
    """Of brackets, wherever they are: those of strings count, which is more than enough."""
    depth = deepest = 0
    for char in text:
        if char in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif char in _CLOSING:
            depth = max(0, depth - 1)
    return deepest
