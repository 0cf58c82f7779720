"""The options of sglang-ext: one place, each an environment variable and a flag of `serve`.

SGLang's scheduler runs in processes of its own, so the flags travel as environment variables;
`sglang serve --speculative-algorithm SSSD` takes the same variables without our launcher.
"""

import argparse
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, fields

ENV_PREFIX = "SGLANG_EXT_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_HEADER_NAME = r"[A-Za-z0-9-]*"


class OptionError(ValueError):
    """An option's value is not usable; the message names it and says what was expected."""


def _option(default, help_text: str, **limits):
    return field(default=default, metadata={"help": help_text, **limits})


@dataclass(frozen=True)
class Options:
    """Server-wide options; every one has a default that works."""

    drafter: str = _option(
        "sssd", "drafter of requests that name none: sssd, none, or an installed plugin's name"
    )
    drafters: str = _option(
        "", "further drafters to load, comma-separated, that requests may choose"
    )
    datastore: str = _option(
        "", "folder of the durable datastore, made if it is not there; empty: memory only"
    )
    live_ingest: bool = _option(True, "let finished outputs join the datastore")
    datastore_max_tokens: int = _option(
        0,
        "served tokens that the datastore holds at most, oldest dropped first; "
        "0: 8 million in memory, 8 x 512 million in a folder",
        low=0,
    )
    datastore_fold_tokens: int = _option(
        1 << 20, "tokens after which the datastore's log becomes a sub-index file", low=1
    )
    namespace_header: str = _option(
        "x-sglang-ext-namespace",
        "HTTP header that names a request's namespace; empty: custom_params.namespace only",
        pattern=_HEADER_NAME,
    )
    prefix_length: int = _option(8, "SSSD: longest matched prefix, P", low=1, high=12)
    branch_length: int = _option(
        12, "SSSD: longest retrieved continuation, in tokens", low=1, high=64
    )
    max_samples: int = _option(
        100, "SSSD: continuations sampled from the datastore per query", low=1, high=10_000
    )
    budget: str = _option(
        "auto",
        "nodes verified per request: auto (measured gain against measured cost) or fixed "
        "(always --speculative-num-draft-tokens)",
        choices=("auto", "fixed"),
    )
    budget_knee: int = _option(
        0,
        "I_knee: tokens of a forward pass past which a batch verifies only sure drafts; "
        "0: measured at start-up",
        low=0,
    )
    oracle_file: str = _option(
        "", "JSONL of token id lists that the drafter 'oracle' proposes (for checks)"
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Options":
        """Read every option from `SGLANG_EXT_<NAME>`; unset ones keep their defaults.

        Raises:
            OptionError: a value does not parse or is out of range.
        """
        env = os.environ if env is None else env
        values = {}
        for option in fields(cls):
            text = env.get(env_name(option.name))
            if text is not None:
                values[option.name] = _parse(option, text, env_name(option.name))
        return cls(**values)

    def loaded_drafters(self) -> list[str]:
        """The names of the drafters to load, the default one first."""
        names = [self.drafter, *(name.strip() for name in self.drafters.split(","))]
        return list(dict.fromkeys(name for name in names if name and name != "none"))


def env_name(option: str) -> str:
    """The environment variable of an option."""
    return ENV_PREFIX + option.upper()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for each option; their defaults are left to `Options`."""
    group = parser.add_argument_group("sglang-ext")
    for option in fields(Options):
        group.add_argument(
            "--" + option.name.replace("_", "-"),
            metavar=type(option.default).__name__.upper(),
            help=f"{option.metadata['help']} [{option.default!r}; {env_name(option.name)}]",
        )


def export_flags(args: argparse.Namespace, env: MutableMapping[str, str]) -> Options:
    """Put the flags that were given into `env`, for the processes to come, and read them back.

    Raises:
        OptionError: a value does not parse or is out of range.
    """
    for option in fields(Options):
        value = getattr(args, option.name, None)
        if value is not None:
            flag = "--" + option.name.replace("_", "-")
            _parse(option, value, flag)
            env[env_name(option.name)] = value
    return Options.from_env(env)


def _parse(option, text: str, source: str):
    if isinstance(option.default, bool):
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise OptionError(f"{source}={text!r}: expected 1 or 0")
    if isinstance(option.default, int):
        return _parse_int(option, text, source)
    choices = option.metadata.get("choices")
    if choices and text not in choices:
        raise OptionError(f"{source}={text!r}: expected one of {', '.join(choices)}")
    pattern = option.metadata.get("pattern")
    if pattern and not re.fullmatch(pattern, text):
        raise OptionError(f"{source}={text!r}: expected letters, digits and hyphens")
    return text


def _parse_int(option, text: str, source: str) -> int:
    low, high = option.metadata.get("low"), option.metadata.get("high")
    expected = "a whole number" + (f" of at least {low}" if low is not None else "")
    expected += f" and at most {high}" if high is not None else ""
    try:
        value = int(text)
    except ValueError:
        raise OptionError(f"{source}={text!r}: expected {expected}") from None
    if (low is not None and value < low) or (high is not None and value > high):
        raise OptionError(f"{source}={text!r}: expected {expected}")
    return value
