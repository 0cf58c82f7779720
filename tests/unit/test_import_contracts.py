"""Imports go one way: what docs/architecture.md says of packages and layers is true of the code.

Source files are parsed, never imported, so that an import inside a function counts as much as one
at the top, and a module that needs a GPU can be checked anywhere.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"

# Package -> top-level packages that no file of it may import.
FORBIDDEN = {
    "speech": {"sglang", "sglang_ext", "datastores", "scripts", "tests"},
    "datastores": {"sglang", "sglang_ext", "speech", "torch", "scripts", "tests"},
    "sglang_ext": {"scripts", "tests"},
}


def module_of(path: Path) -> str:
    """The dotted name of a source file, the package's for its `__init__.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Dotted names that a source may import, wherever in it; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            up = len(parts) - node.level + is_package if node.level else 0
            base = ".".join([*parts[:up], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield str(name.value)


def files_of(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no package {package} in {ROOT}"
    return files


def imports_in(path: Path) -> set[str]:
    return set(imports_of(path.read_text(), module_of(path), path.name == "__init__.py"))


def stated_layers() -> dict[str, int]:
    """Root module or folder of sglang_ext -> the number of its layer, as the page's table says."""
    layers: dict[str, int] = {}
    for number, cell in re.findall(r"^\| (\d) [^|]*\|([^|]*)\|", PAGE.read_text(), re.MULTILINE):
        for name in re.findall(r"`(\w+)/?`", cell):
            assert name not in layers, f"docs/architecture.md puts {name} into two layers"
            layers[name] = int(number)
    assert layers, "docs/architecture.md has no table of layers"
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


def room(name: str) -> str | None:
    """The root module or folder of sglang_ext that a dotted name lies in; None: in none of them.

    `sglang_ext` itself and what its `__init__.py` defines (`__version__`) lie in none.
    """
    parts = name.split(".")
    if parts[0] != "sglang_ext" or len(parts) < 2:
        return None
    path = ROOT / "sglang_ext" / parts[1]
    return parts[1] if path.is_dir() or path.with_suffix(".py").is_file() else None


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_nothing_that_lies_above_it(package: str):
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in files_of(package)
        for name in sorted(imports_in(path))
        if name.split(".")[0] in FORBIDDEN[package]
    ]
    assert not wrong, wrong


def test_every_root_module_and_folder_has_a_layer():
    present = {room(module_of(path)) for path in files_of("sglang_ext")} - {None}
    assert set(stated_layers()) == present, "the table of layers in docs/architecture.md differs"


def test_lower_layers_import_no_higher_one_but_for_the_stated_exceptions():
    exceptions = stated_exceptions()
    wrong = [
        f"{module} imports {name}"
        for module, name in sorted(upward_imports())
        if not any(module == m and (name + ".").startswith(e + ".") for m, e in exceptions)
    ]
    assert not wrong, wrong


def test_every_stated_exception_is_still_needed():
    upward = upward_imports()
    unused = [
        (module, target)
        for module, target in sorted(stated_exceptions())
        if not any(m == module and (n + ".").startswith(target + ".") for m, n in upward)
    ]
    assert not unused, unused


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import sglang.srt as s", {"sglang.srt"}),
        ("def f():\n    from sglang import srt, lang", {"sglang.srt", "sglang.lang"}),
        ("from . import x", {"speech.specasr.x"}),
        ("from ..audio import decode", {"speech.audio.decode"}),
        ("import importlib\nimportlib.import_module('sglang')", {"importlib", "sglang"}),
    ],
)
def test_imports_of_every_form_are_found(source: str, names: set[str]):
    assert set(imports_of(source, "speech.specasr.cache", is_package=False)) == names


def test_a_package_is_the_base_of_its_own_relative_imports():
    found = imports_of("from .cache import A", "speech.specasr", is_package=True)
    assert set(found) == {"speech.specasr.cache.A"}
