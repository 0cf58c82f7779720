"""Imports go one way: what docs/architecture.md says of packages and layers is true of the code."""

import pytest

from scripts.lib.import_layers import (
    FORBIDDEN,
    circles,
    files_of,
    imports_in,
    imports_of,
    module_graph,
    module_level_imports,
    module_of,
    room,
    stated_exceptions,
    stated_layers,
    unstated_upward_imports,
    upward_imports,
)


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
    wrong = [f"{module} imports {name}" for module, name in unstated_upward_imports()]
    assert not wrong, wrong


def test_every_stated_exception_is_still_needed():
    upward = upward_imports()
    unused = [
        (module, target)
        for module, target in sorted(stated_exceptions())
        if not any(m == module and (n + ".").startswith(target + ".") for m, n in upward)
    ]
    assert not unused, unused


def test_no_modules_import_each_other_in_a_circle():
    assert not circles(module_graph())


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


def test_imports_for_type_checkers_count_for_circles_and_those_in_functions_do_not():
    source = (
        "if TYPE_CHECKING:\n    import a\nclass C:\n    import b\n    def f():\n        import c"
    )
    found = module_level_imports(source, "m", is_package=False)
    assert sorted(found) == [("a", 2), ("b", 4)]


def test_a_circle_is_found_through_other_modules():
    graph = {"a": {"b": 1}, "b": {"c": 1}, "c": {"a": 1}, "d": {"a": 1}, "e": {}}
    assert circles(graph) == [["a", "b", "c"]]
