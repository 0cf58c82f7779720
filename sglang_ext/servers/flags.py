"""Reading and replacing flags in a command line that SGLang parses later."""

from collections.abc import Sequence


def flag_value(argv: Sequence[str], *names: str) -> str | None:
    """The value of the last of `--name value` or `--name=value` in argv; None: not given."""
    found = None
    for i, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name in names:
            if equals:
                found = value
            elif i + 1 < len(argv):
                found = argv[i + 1]
    return found


def set_flag(argv: Sequence[str], value: str, *names: str) -> list[str]:
    """argv with the value of every flag of these names replaced."""
    changed, replace_next = [], False
    for arg in argv:
        name, equals, _ = arg.partition("=")
        if replace_next:
            changed.append(value)
            replace_next = False
        elif name in names and equals:
            changed.append(f"{name}={value}")
        else:
            changed.append(arg)
            replace_next = name in names
    return changed
