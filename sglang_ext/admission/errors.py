"""How refusals of a request travel: SGLang answers a ValueError with a 400."""

from collections.abc import Iterator
from contextlib import contextmanager

# What code that only rearranges a request raises where its fields do not fit together.
_MISFITS = (
    TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RecursionError,
)  # fmt: skip


class AdmissionError(ValueError):
    """A request is refused; the message names the field and what was expected."""


@contextmanager
def refusing(doing: str) -> Iterator[None]:
    """Errors of code that depends on the request alone are the request's.

    Args:
        doing: what the code does, for the message.

    Raises:
        AdmissionError: instead of a TypeError and the like.
    """
    try:
        yield
    except _MISFITS as error:
        text = str(error) if len(str(error)) <= 200 else str(error)[:200] + "..."
        raise AdmissionError(
            f"the request cannot be read ({doing}): {type(error).__name__}: {text}"
        ) from error
