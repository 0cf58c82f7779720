"""Looks dotted names up in source files, without importing them: of any version, on any machine."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_MOST_STEPS = 20  # from import to import, and from class to base


class _Missing(LookupError):
    pass


def problem(target: str, takes: str, folder: Path | None = None) -> str | None:
    """What is wrong with a point; None: nothing.

    Args:
        target: a dotted name, the module's included: a function, a class, a member of a class, or
            an attribute that one of its methods sets on `self`.
        takes: parameters that it must have: "a, b, *, c" are a and b in front, and c anywhere.
        folder: where its top package lies; by default, or if it does not, where Python finds it.
    """
    try:
        found = _lookup(target, folder, _MOST_STEPS)
    except _Missing as error:
        return str(error)
    if not takes:
        return None
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return "is no function any more"
    return _parameters_problem(found.args, takes)


def _parameters_problem(there: ast.arguments, takes: str) -> str | None:
    first, _, named = takes.partition("*")
    by_position = [a.arg for a in (*there.posonlyargs, *there.args)]
    wanted = _names(first)
    if by_position[: len(wanted)] != wanted:
        return f"takes ({', '.join(by_position)}), no longer ({', '.join(wanted)}, ...)"
    every = {*by_position, *(a.arg for a in there.kwonlyargs)}
    missing = [name for name in _names(named) if name not in every]
    if missing and there.kwarg is None:
        return f"has no parameter {', '.join(missing)} any more"
    return None


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _lookup(target: str, folder: Path | None, steps: int) -> ast.AST:
    """The node that defines a dotted name; the module itself for a module's name."""
    if not steps:
        raise _Missing("is imported in a circle")
    path, names = _module_file(target.split("."), folder)
    module = _parsed(path)
    found: ast.AST = module
    for i, name in enumerate(names):
        if isinstance(found, ast.Module):
            found = _in_module(found, name, folder, steps)
        elif isinstance(found, ast.ClassDef):
            found = _in_class(found, name, module, folder, steps)
        else:
            raise _Missing(f"{'.'.join(names[:i])} has no attributes")
    return found


def _module_file(parts: list[str], folder: Path | None) -> tuple[Path, list[str]]:
    """The file of the longest module that a dotted name begins with, and what is left of it."""
    place = folder / parts[0] if folder else None
    if place is None or not place.is_dir():
        spec = importlib.util.find_spec(parts[0])
        if spec is None or not spec.origin:
            raise _Missing(f"there is no package {parts[0]}")
        place = Path(spec.origin).parent
    for i, part in enumerate(parts[1:], 1):
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").is_file():
            return place / f"{part}.py", parts[i + 1 :]
        elif (place / "__init__.py").is_file():
            return place / "__init__.py", parts[i:]
        else:
            raise _Missing(f"there is no module {'.'.join(parts[: i + 1])}")
    return place / "__init__.py", []


@lru_cache(maxsize=256)
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _in_module(module: ast.Module, name: str, folder: Path | None, steps: int) -> ast.AST:
    """The last definition of a name outside of functions and classes, else what it imports."""
    found: ast.AST | None = None
    imported: str | None = None
    for node in _statements(module.body):
        if _defines(node, name):
            found = node
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    imported = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname == name or (alias.asname is None and alias.name == name):
                    imported = alias.name
    if found is None and imported:  # one for type checkers may name what the module defines
        return _lookup(imported, folder, steps - 1)
    if found is None:
        raise _Missing(f"its module has no {name}")
    return found


def _in_class(
    cls: ast.ClassDef, name: str, module: ast.Module, folder: Path | None, steps: int
) -> ast.AST:
    """A member of a class or of its bases, or where it is set on `self`."""
    if not steps:
        raise _Missing("has itself as base")
    for node in reversed(list(_statements(cls.body))):
        if _defines(node, name):
            return node
    for inner in ast.walk(cls):
        stored = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if stored and ast.unparse(inner) == f"self.{name}":
            return inner
    for base in cls.bases:
        try:
            of_base = _in_module(module, ast.unparse(base), folder, steps)
            if isinstance(of_base, ast.ClassDef):
                return _in_class(of_base, name, module, folder, steps - 1)
        except _Missing:
            continue
    raise _Missing(f"{cls.name} has no {name}")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in their order, those within `if`, `try` and `with` included."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)
