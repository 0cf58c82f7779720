"""Packages that only some commands need, by the extra of pyproject.toml that installs them."""

from collections.abc import Iterable
from importlib.util import find_spec

# Extra -> modules that tell whether it is installed; pd's transfer library is checked where chosen.
MODULES = {
    "speech": ("whisper", "silero_vad", "av"),
    "sweep": ("matplotlib", "jiwer"),  # aiohttp, of sweep and pd, comes with sglang
    "pd": ("sglang_router",),
}


class MissingExtra(ValueError):
    """An extra is not installed; the message says how to install it, in one line."""


def is_installed(extra: str) -> bool:
    """Whether all modules of an extra of MODULES can be found; nothing is imported."""
    return all(find_spec(name) is not None for name in MODULES[extra])


def require(what: str, extras: Iterable[str]) -> None:
    """Check that extras are installed.

    Args:
        what: that needs them, as the message's first words.
        extras: names in MODULES.

    Raises:
        MissingExtra: one or more are not; the message names all of those.
    """
    missing = [extra for extra in extras if not is_installed(extra)]
    if missing:
        names = ",".join(missing)
        raise MissingExtra(f"{what} needs packages of an extra: pip install 'sglang-ext[{names}]'")
