"""The only way to SGLang's HookRegistry, and to its attributes: by a point of the list."""

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.sglang_points import POINTS, SUPPORTED, How, Point

# Set to 1, it lets another version try.
ANY_VERSION = "SGLANG_EXT_ANY_SGLANG"
_HOOKED = (How.BEFORE, How.AFTER, How.AROUND)


def hook(point: Point, function: Callable[..., Any]) -> None:
    """Register a function with SGLang, which puts it in once its plugins have loaded.

    Args:
        point: where, and whether before, after or around.
        function: as HookRegistry.register has it: before takes the arguments, after the result
            and these, around the original and these.

    Raises:
        ValueError: the point is not of the list, or is no hook's.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _check(point, _HOOKED)
    HookRegistry.register(point.target, function, HookType(point.how.value))


def apply_hooks() -> None:
    """Put in at once what was registered after SGLang had loaded its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def assign(point: Point, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of SGLang's where it stands, and nowhere else.

    Args:
        make: gives the new one, from the one that is there.

    Raises:
        ValueError: the point is not of the list, or is not assigned to.
    """
    import pkgutil

    _check(point, (How.ASSIGNED,))
    place, _, name = point.target.rpartition(".")
    owner = pkgutil.resolve_name(place)
    setattr(owner, name, make(getattr(owner, name)))


def _check(point: Point, allowed: tuple[How, ...]) -> None:
    if point not in POINTS:
        raise ValueError(f"{point.target} is not listed in sglang_ext/sglang_points")
    if point.how not in allowed:
        raise ValueError(f"{point.target} is listed as {point.how.value}")


def refusal(environment: Mapping[str, str] = os.environ) -> str | None:
    """One line that says why we do not work with the SGLang installed; None: we do."""
    installed = _installed()
    if installed.partition("+")[0] in SUPPORTED or environment.get(ANY_VERSION) == "1":
        return None
    return (
        f"sglang-ext supports sglang {' and '.join(SUPPORTED)}, and {installed} is installed: "
        f"pip install sglang=={SUPPORTED[-1]} (or set {ANY_VERSION}=1 to try it anyway)"
    )


def _installed() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:  # sources on the path, without metadata
        return str(importlib.import_module("sglang").__version__)
