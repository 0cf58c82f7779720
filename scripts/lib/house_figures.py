"""What can be counted of the source without running it, each violation with its file and line."""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.import_layers import (
    PACKAGES,
    ROOT,
    circles,
    files_of,
    module_graph,
    unstated_upward_imports,
)
from sglang_ext import sglang_points

LONGEST_FUNCTION = 50
_FREE_NAMES = ("__init__.py", "__main__.py")
_LOOKUPS = ("getattr", "hasattr")


@dataclass(frozen=True)
class Place:
    """Something that counts: where it is (`file:line`, or a file or module) and what it is."""

    where: str
    what: str


def root_files() -> list[Place]:
    """The modules directly in sglang_ext/, `__init__.py` among them."""
    return [Place(_name(p), "root module") for p in sorted((ROOT / "sglang_ext").glob("*.py"))]


def duplicate_file_names() -> list[Place]:
    """Base names that several tracked Python files outside tests/ bear, one place for each name."""
    by_name: dict[str, list[str]] = defaultdict(list)
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for path in map(Path, listed.stdout.splitlines()):
        outside = path.parts[0] != "tests" and path.name not in _FREE_NAMES
        if outside and (ROOT / path).is_file():  # one that was just moved is still listed
            by_name[path.name].append(str(path))
    return [
        Place(", ".join(paths), f"{len(paths)} files are called {name}")
        for name, paths in sorted(by_name.items())
        if len(paths) > 1
    ]


def getattr_hooks() -> list[Place]:
    """Lookups by getattr or hasattr of what `Drafter` declares, anywhere in sglang_ext.

    The name is one of the class's; a name that is no literal counts where the object is called
    a drafter.
    """
    hooks = declared_hooks((ROOT / "sglang_ext" / "drafters" / "__init__.py").read_text())
    return [
        Place(f"{_name(path)}:{line}", what)
        for path in files_of("sglang_ext")
        for line, what in hook_lookups(path.read_text(), hooks)
    ]


def declared_hooks(source: str) -> set[str]:
    """The public methods and attributes that a source's class `Drafter` declares."""
    body = next(
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == "Drafter"
    )
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    names |= {ast.unparse(t) for node in body if isinstance(node, ast.Assign) for t in node.targets}
    return {name for name in names if not name.startswith("_")}


def hook_lookups(source: str, hooks: set[str]) -> Iterator[tuple[int, str]]:
    """(line, call) of each getattr or hasattr of a hook in a source."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        if not isinstance(node.func, ast.Name) or node.func.id not in _LOOKUPS:
            continue
        of, name = node.args[:2]
        if isinstance(name, ast.Constant):
            found = name.value in hooks
        else:
            found = "drafter" in ast.unparse(of).lower()
        if found:
            yield node.lineno, ast.unparse(node)


def worker_lines() -> int:
    """Lines of sglang_ext/worker.py."""
    return len((ROOT / "sglang_ext" / "worker.py").read_text().splitlines())


def functions_over_50_lines() -> list[Place]:
    """Functions of our packages from `def` to their last line, without decorators."""
    return [
        Place(f"{_name(path)}:{line}", f"{name} has {lines} lines")
        for package in PACKAGES
        for path in files_of(package)
        for line, name, lines in long_functions(path.read_text())
    ]


def long_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """(line, name, number of lines) of the functions of a source above the limit."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                yield node.lineno, node.name, lines


def import_circles() -> list[Place]:
    """Modules that import each other outside functions, those for type checkers included."""
    graph = module_graph()
    return [
        Place(
            ", ".join(
                f"{module} (line {line})"
                for module in group
                for target, line in graph[module].items()
                if target in group
            ),
            "import each other",
        )
        for group in circles(graph)
    ]


def upward_imports() -> list[Place]:
    """Imports of a higher layer or package that docs/architecture.md does not allow."""
    return [
        Place(module, f"imports {name}, which lies above it")
        for module, name in unstated_upward_imports()
    ]


def unresolved_hook_targets() -> list[Place]:
    """Places where SGLang is touched that the installed SGLang does not have as we need them."""
    problems = (problem.partition(": ") for problem in sglang_points.unresolved())
    return [Place(target, wrong) for target, _, wrong in problems]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))
