"""Commands that the docs show in ```sh and ```bash blocks, and what to do with each of them."""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from scripts.lib.chromium import find_chromium
from scripts.lib.import_layers import ROOT

# A block behind `<!-- not run: reason -->` is left out, for that reason.
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*?) -->\n\n?)?^```(?:sh|bash)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
_HERE_DOC = re.compile(r"(?<!<)<<(?!<)-?\s*['\"]?(\w+)['\"]?")
_ASSIGNMENT = re.compile(r"^(\w+)=", re.MULTILINE)
_SERVERS = ("sglang-ext serve", "sglang-ext pd", "sglang serve")
_LONGEST_MINUTES = 15
_MANY = 10_000


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: relative to the repository.
        line: where it begins, counted from 1.
        text: as shown, continuation lines joined, comments left out.
        reason: why its page says that it is not run; None: it says nothing.
    """

    page: str
    line: int
    text: str
    reason: str | None = None


class Kind(Enum):
    """What is done with a command."""

    RUN = "run"
    SERVE = "started as a server for the commands behind it"
    SKIP = "skipped"


@dataclass(frozen=True)
class Plan:
    """What is done with a command, and as what it is run or why it is not."""

    kind: Kind
    text: str


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and docs/*.md."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_of(page: Path) -> list[Command]:
    """All commands of a page of this repository, in its order."""
    return list(extract(page.read_text(), str(page.relative_to(ROOT))))


def extract(text: str, page: str = "") -> Iterator[Command]:
    """The commands of a page's text."""
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start("text")) + 1
        for line, command in _split(block["text"]):
            yield Command(page, first + line, command, block["reason"])


def _split(block: str) -> Iterator[tuple[int, str]]:
    """(line, counted from 0; command) of a block of shell."""
    lines = block.splitlines()
    at = 0
    while at < len(lines):
        begin, text = at, lines[at]
        while not _is_whole(text) and at + 1 < len(lines):
            at += 1
            text += "\n" + lines[at]
        at += 1
        command = _without_comment(text.replace("\\\n", " "))
        if command:
            yield begin, re.sub(r"\s{2,}", " ", command) if "\n" not in command else command


def _is_whole(text: str) -> bool:
    """Whether a command ends here: no open quote, continuation or here-document."""
    here = _HERE_DOC.search(text)
    if here and text.splitlines()[-1].strip() != here[1]:
        return False
    if text.endswith("\\"):
        return False
    try:
        shlex.split(text if not here else text.splitlines()[0], comments=True)
    except ValueError:
        return False
    return True


def _without_comment(text: str) -> str:
    """The command without a comment at the end of its line; "" where that is all.

    A here-document is left as it is.
    """
    if _HERE_DOC.search(text):
        return text
    quote = ""
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (i == 0 or text[i - 1].isspace()):
            end = text.find("\n", i)
            return (text[:i] + (text[end:] if end >= 0 else "")).strip()
    return text.strip()


def assigned(text: str) -> list[str]:
    """The shell variables that a command sets for those behind it."""
    return _ASSIGNMENT.findall(text)


def plan(command: Command, has_gpu: bool = False) -> Plan:
    """What is done with a command of the docs.

    Args:
        command: from `extract`.
        has_gpu: whether this machine has a CUDA device.
    """
    if command.reason is not None:
        return Plan(Kind.SKIP, f"its page: {command.reason}")
    text = command.text
    for is_it, reason in _SKIPPED:
        if is_it(text):
            return Plan(Kind.SKIP, reason)
    if _needs_gpu(text) and not has_gpu:
        return Plan(Kind.SKIP, "needs a GPU, or CUDA's compiler")
    program = shlex.split(text, comments=True)[0]
    if re.fullmatch(r"[\w-]+", program) and not _is_there(program):
        return Plan(Kind.SKIP, f"{program} is not installed here")
    if text.startswith(_SERVERS):
        return Plan(Kind.SERVE, text)
    return Plan(Kind.RUN, _short(text))


def _is_there(program: str) -> bool:
    return program in (".", "eval") or any(
        shutil.which(program, path=path) for path in (None, str(ROOT / ".venv" / "bin"))
    )


def _needs_gpu(text: str) -> bool:
    """The GPU kit's runs; what it packs and lists is made anywhere."""
    needs = r"scripts\.gpu_kit(?! --list-carry| --pack)|gpu_kit/unpack\.py"
    return re.search(needs, text) is not None


def _takes_minutes(text: str) -> bool:
    minutes = re.search(r"--minutes (\d+)", text)
    return minutes is not None and int(minutes[1]) > _LONGEST_MINUTES


def _takes_many(text: str) -> bool:
    many = re.search(r"--(?:requests|files) (\d+)", text)
    return many is not None and int(many[1]) >= _MANY


def _needs_suffix_decoding(text: str) -> bool:
    """Its package is no dependency of ours: it is built by `make peers`."""
    methods = re.search(r"--methods (\S+)", text)
    all_methods = text.startswith("sglang-ext sweep --out") and not (
        methods or "whisper" in text or "retranslation" in text
    )
    named = re.search(r"--(?:drafters?|methods) \S*\bsuffix\b", text) is not None
    return (named or all_methods) and find_spec("arctic_inference") is None


def _needs_chromium(text: str) -> bool:
    return "check_captions_page" in text and find_chromium() is None


_Rule = tuple[Callable[[str], object], str]
_SKIPPED: tuple[_Rule, ...] = (
    (re.compile(r"make (test|unit)\b").match, "the tests themselves: --test-minutes runs them"),
    (re.compile(r"make peers\b|pip install\b|make setup\b").match, "installs packages"),
    (re.compile(r"find .* -delete$").match, "deletes compiled code that others may be using"),
    (_needs_suffix_decoding, "needs the package that `make peers` builds"),
    (_needs_chromium, "needs the package chromium"),
    (_takes_minutes, f"takes more than {_LONGEST_MINUTES} minutes by its own --minutes"),
    (_takes_many, "takes an hour; README's list has it with --quick"),
)


def _short(text: str) -> str:
    """The command in its documented short form, in which checks and sweeps end within minutes."""
    script = re.match(r"python -m scripts\.(\w+)(?=\s|$)", text)
    if script:
        path = ROOT / "scripts" / f"{script[1]}.py"
        has_short_form = path.is_file() and "scripts.lib.figures import parser" in path.read_text()
    else:
        has_short_form = text.startswith("sglang-ext sweep --out")
    return f"{text} --quick" if has_short_form and "--quick" not in text else text
