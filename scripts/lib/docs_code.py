"""What of this repository a command of the docs reads, as a fingerprint: two runs of a command with
the same one are runs of the same code."""

import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.import_layers import ROOT, imports_in

# What no command reads but as text to a person, and what runs the commands.
_UNREAD = re.compile(
    r"\.md$|^docs/|^tests/|^\.ci/|^Makefile$|^scripts/check_house\.py$"
    r"|^scripts/lib/(docs|house)_\w+\.py$"
)


@dataclass(frozen=True)
class _Part:
    """Files that a command reads only where it, or something that it reads, names them.

    Attributes:
        files: their paths.
        whole: what names all of them; None: each is named by itself alone (_NAME).
    """

    files: re.Pattern[str]
    whole: re.Pattern[str] | None = None


# No server reads the sweep, nor what ships datastores; what runs on CUDA is loaded by every server,
# and run on no CPU but for what stages arrays.
_PARTS = (
    _Part(re.compile(r"scripts/.*\.py$")),
    _Part(re.compile(r"sglang_ext/sweep/.*\.py$"), re.compile(r"\bsglang-ext sweep\b")),
    _Part(
        re.compile(r"datastores/shipping/"),
        re.compile(r"\bdatastores[./]shipping\b|-ext datastore\b"),
    ),
    _Part(
        re.compile(r"sglang_ext/cuda/(?!staging|__init__)"), re.compile(r"\bsglang_ext[./]cuda\b")
    ),
)
_NAME = re.compile(r"\b(?:scripts|sglang_ext[./]sweep)[./]\w+(?:[./]\w+)*")


class CheckedOut:
    """The files of a commit.

    All packages that are installed are read by every command but for _PARTS; of these and of the
    Makefile a command reads what it names, and what that imports or names in turn.

    Args:
        files: path, relative to `root` -> the hash of what it holds.
        root: where they lie.
    """

    def __init__(self, files: Mapping[str, str], root: Path = ROOT):
        self._root = root
        self._files = {path: blob for path, blob in files.items() if not _UNREAD.search(path)}
        self._makefile = MakeRules((root / "Makefile").read_text())

    def fingerprint(self, text: str) -> str:
        """Of what one command reads, or several.

        Args:
            text: as shown.
        """
        made = "".join(
            self._makefile.text_of(words.split()) for words in re.findall(r"\bmake\b(.*)", text)
        )
        named = self._read(text + made)
        read = [made] + [
            f"{path} {blob}"
            for path, blob in sorted(self._files.items())
            if path in named or not any(part.files.match(path) for part in _PARTS)
        ]
        return hashlib.sha256("\n".join(read).encode()).hexdigest()

    def _read(self, text: str) -> set[str]:
        """Files of _PARTS that a text names, and those that they need."""
        found: set[str] = set()
        waiting = list(self._named(text))
        while waiting:
            path = waiting.pop()
            if path not in found:
                found.add(path)
                source = self._root / path
                waiting.extend(self._named(source.read_text()))
                waiting.extend(self._named("\n".join(imports_in(source, self._root))))
        return found

    def _named(self, text: str) -> Iterator[str]:
        for part in _PARTS:
            if part.whole and part.whole.search(text):
                yield from filter(part.files.match, self._files)
        for name in _NAME.findall(text):
            path = name.removesuffix(".py").replace(".", "/")
            while "/" in path:  # a.b.c may be c of the module a.b
                if f"{path}.py" in self._files:
                    yield f"{path}.py"
                    break
                if f"{path}/__main__.py" in self._files:  # its parts find each other by name
                    yield from (f for f in self._files if re.match(rf"{path}/.*\.py$", f))
                    break
                path = path.rpartition("/")[0]


class MakeRules:
    """A Makefile's rules, each as its text, and what stands between them.

    Args:
        text: the Makefile's.
    """

    def __init__(self, text: str):
        self._common = ""
        self._rules: dict[str, str] = {}
        self._needs: dict[str, list[str]] = {}
        target = ""
        for line in text.splitlines(keepends=True):
            rule = re.match(r"([^\s:=.#][^\s:=]*):(?!=)(.*)", line)
            if rule:
                target = rule[1]
                self._needs[target], self._rules[target] = rule[2].split(), line
            elif line.startswith("\t") and target:
                self._rules[target] += line
            elif not line.startswith("#"):
                target, self._common = "", self._common + line

    def text_of(self, words: Iterable[str]) -> str:
        """Rules that a call of make names, those that they need, and what all share.

        Args:
            words: behind `make`; without a target, the first rule.
        """
        waiting = [word for word in words if word in self._rules] or list(self._rules)[:1]
        found: dict[str, str] = {}
        while waiting:
            target = waiting.pop()
            if target in self._rules and target not in found:
                found[target] = self._rules[target]
                waiting += self._needs[target]
        return self._common + "".join(text for _, text in sorted(found.items()))


def checked_out() -> CheckedOut | None:
    """What is checked out here; None: files differ from the commit."""

    def git(*words: str) -> str:
        command = ["git", *words]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    if git("status", "--porcelain"):
        return None
    files = {}
    for line in git("ls-tree", "-r", "HEAD").splitlines():
        blob, _, path = line.partition("\t")
        files[path] = blob.split()[2]
    return CheckedOut(files)
