"""Who imports whom in this repository, and what docs/architecture.md allows.

Source files are parsed, never imported: an import inside a function counts as much as one at the
top, and a module that needs a GPU can be checked anywhere.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("sglang_ext", "speech", "datastores", "scripts")

# Package -> top-level packages that no file of it may import.
FORBIDDEN = {
    "speech": {"sglang", "sglang_ext", "datastores", "scripts", "tests"},
    "datastores": {"sglang", "sglang_ext", "speech", "torch", "scripts", "tests"},
    "sglang_ext": {"scripts", "tests"},
}


def module_of(path: Path, root: Path = ROOT) -> str:
    """The dotted name of a source file, the package's for its `__init__.py`."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Dotted names that a source may import, wherever in it; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        yield from (name for name, _ in _imported_by(node, module, is_package))
        if isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield str(name.value)


def module_level_imports(source: str, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of the imports outside functions, those for type checkers included."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        yield from _imported_by(node, module, is_package)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def _imported_by(node: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of an import statement's names; none for other nodes."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = module.split(".")
        up = len(parts) - node.level + is_package if node.level else 0
        base = ".".join([*parts[:up], *filter(None, [node.module])])
        yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def files_of(package: str) -> list[Path]:
    """The source files of a package of this repository, sorted.

    Raises:
        FileNotFoundError: it has none.
    """
    files = sorted((ROOT / package).rglob("*.py"))
    if not files:
        raise FileNotFoundError(f"no package {package} in {ROOT}")
    return files


def imports_in(path: Path, root: Path = ROOT) -> set[str]:
    """What a source file may import, as `imports_of` names it."""
    return set(imports_of(path.read_text(), module_of(path, root), path.name == "__init__.py"))


def stated_layers() -> dict[str, int]:
    """Root module or folder of sglang_ext -> the number of its layer, as the page's table says.

    Raises:
        ValueError: the page puts a name into two layers, or has no such table.
    """
    layers: dict[str, int] = {}
    for number, cell in re.findall(r"^\| (\d) [^|]*\|([^|]*)\|", PAGE.read_text(), re.MULTILINE):
        for name in re.findall(r"`(\w+)/?`", cell):
            if name in layers:
                raise ValueError(f"docs/architecture.md puts {name} into two layers")
            layers[name] = int(number)
    if not layers:
        raise ValueError("docs/architecture.md has no table of layers")
    return layers


def stated_exceptions() -> set[tuple[str, str]]:
    """(module that imports, module of a higher layer) of the page's table of exceptions."""
    rows = re.findall(
        r"^\| `(sglang_ext[\w.]*)` \| `(sglang_ext[\w.]*)` \|", PAGE.read_text(), re.M
    )
    return set(rows)


def upward_imports() -> set[tuple[str, str]]:
    """(module, imported name) of each import from a lower layer of sglang_ext into a higher one."""
    layers = stated_layers()
    found = set()
    for path in files_of("sglang_ext"):
        module = module_of(path)
        for name in imports_in(path):
            importer, imported = room(module), room(name)
            if importer and imported and layers[imported] > layers[importer]:
                found.add((module, name))
    return found


def unstated_upward_imports() -> list[tuple[str, str]]:
    """(module, imported name) of what no table allows, in layers and between packages, sorted."""
    exceptions = stated_exceptions()
    between = {
        (module_of(path), name)
        for package, forbidden in FORBIDDEN.items()
        for path in files_of(package)
        for name in imports_in(path)
        if name.split(".")[0] in forbidden
    }
    inside = {
        (module, name)
        for module, name in upward_imports()
        if not any(module == m and (name + ".").startswith(e + ".") for m, e in exceptions)
    }
    return sorted(between | inside)


def room(name: str) -> str | None:
    """The root module or folder of sglang_ext that a dotted name lies in; None: in none of them.

    `sglang_ext` itself and what its `__init__.py` defines (`__version__`) lie in none.
    """
    parts = name.split(".")
    if parts[0] != "sglang_ext" or len(parts) < 2:
        return None
    path = ROOT / "sglang_ext" / parts[1]
    return parts[1] if path.is_dir() or path.with_suffix(".py").is_file() else None


def module_graph() -> dict[str, dict[str, int]]:
    """Module -> modules of ours that it imports outside functions -> the line.

    `from package import name` is an import of the module `package.name` where there is one, else
    of the package; that importing a module runs its package's `__init__.py` is not counted.
    """
    paths = {module_of(path): path for package in PACKAGES for path in files_of(package)}
    graph: dict[str, dict[str, int]] = {}
    for module, path in paths.items():
        links: dict[str, int] = {}
        graph[module] = links
        found = module_level_imports(path.read_text(), module, path.name == "__init__.py")
        for name, line in found:
            target = name if name in paths else name.rpartition(".")[0]
            if target in paths and target != module:
                links.setdefault(target, line)
    return graph


def circles(graph: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others, sorted."""
    reached = {module: _reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in seen if module in reached[other]))
        for module, seen in reached.items()
        if module in seen
    }
    return [list(group) for group in sorted(groups)]


def _reachable(graph: Mapping[str, Mapping[str, int]], module: str) -> set[str]:
    """What `module` imports, directly or through others; itself only on a circle."""
    seen: set[str] = set()
    waiting = list(graph[module])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(graph.get(name, ()))
    return seen
