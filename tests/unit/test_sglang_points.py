"""Every place of SGLang that we touch is listed, and is there in the installed wheel."""

import ast
import importlib.metadata
import inspect
import logging
import pkgutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from scripts import sglang_points as page
from scripts.lib.import_layers import ROOT, files_of, module_of
from sglang_ext import plugin, sglang_points
from sglang_ext.sglang_points import POINTS, How, Point, hooking, sources, unresolved

HOOKED = [p for p in POINTS if p.how in (How.BEFORE, How.AFTER, How.AROUND)]
HOOKING = "sglang_ext.sglang_points.hooking"


def test_every_point_is_in_the_installed_sources():
    assert unresolved() == []


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.target)
def test_every_point_can_be_had_with_the_parameters_that_we_rely_on(point: Point):
    owner, _, name = point.target.rpartition(".")
    found = pkgutil.resolve_name(owner)
    if not hasattr(found, name):  # set in a method, for each instance
        assert f"self.{name} = " in inspect.getsource(found)
        return
    if not point.takes:
        return
    first, _, named = (part.strip(" ,") for part in point.takes.partition("*"))
    raw = inspect.getattr_static(found, name)
    there = list(inspect.signature(getattr(raw, "__func__", raw)).parameters)
    wanted = first.split(", ") if first else []
    assert there[: len(wanted)] == wanted
    assert set(named.split(", ") if named else []) <= set(there)


def test_no_point_is_listed_twice_and_each_names_a_module_of_ours():
    places = [(p.target, p.how) for p in POINTS]
    assert len(set(places)) == len(places)
    wrong = [p.by for p in POINTS if not (ROOT / "sglang_ext" / f"{p.by}.py").is_file()]
    assert not wrong


@pytest.mark.parametrize("kind", ["before", "after", "around"])
def test_a_hook_is_registered_at_its_point_and_of_its_kind(monkeypatch, kind):
    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *given: registered.append(given))
    point = next(p for p in HOOKED if p.how == kind)
    hooking.hook(point, print)
    assert registered == [(point.target, print, HookType[kind.upper()])]


def test_a_hook_on_what_is_not_listed_is_refused():
    unlisted = Point("sglang.srt.server_args.ServerArgs.resolve_once", How.AFTER, "plugin", "")
    with pytest.raises(ValueError, match="resolve_once is not listed"):
        hooking.hook(unlisted, print)
    with pytest.raises(ValueError, match="get_spec is listed as assigned"):
        hooking.hook(sglang_points.CORPUS_SPEC, print)
    with pytest.raises(ValueError, match=r"SamplingParams\.verify is listed as after"):
        hooking.assign(sglang_points.CUSTOM_PARAMS, lambda original: original)


def test_an_assignment_gets_what_was_there_and_changes_that_module_only(monkeypatch):
    from sglang.srt import runtime_context
    from sglang.srt.managers import tokenizer_control_mixin as mixin

    original = mixin.get_spec
    monkeypatch.setattr(mixin, "get_spec", original)  # put back afterwards
    hooking.assign(sglang_points.CORPUS_SPEC, lambda was: lambda: (was, "ours"))
    assert mixin.get_spec() == (original, "ours")
    assert runtime_context.get_spec is original


def test_every_hooked_point_is_used_by_the_module_that_it_names():
    names = {
        point: name
        for name, value in vars(sglang_points).items()
        for point in (value if isinstance(value, tuple) else (value,))
        if isinstance(point, Point) and name != "POINTS"
    }
    used = [p for p in POINTS if p in HOOKED or p.how == How.ASSIGNED]
    unused = [
        p.target
        for p in used
        if f"sglang_points.{names[p]}" not in (ROOT / "sglang_ext" / f"{p.by}.py").read_text()
    ]
    assert not unused


def sources_of_ours() -> list[tuple[str, ast.Module]]:
    return [(module_of(path), ast.parse(path.read_text())) for path in files_of("sglang_ext")]


def from_sglang(tree: ast.Module) -> dict[str, str]:
    """Names that a module has from SGLang -> dotted name; a name assigned from one counts."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname and "sglang." in a.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute | ast.Name):
            root, _, rest = ast.unparse(node.value).partition(".")
            for target in node.targets:
                if root in names and isinstance(target, ast.Name):
                    names[target.id] = ".".join(filter(None, [names[root], rest]))
    return names


def assigned(tree: ast.Module) -> Iterator[str]:
    """What of SGLang's modules and classes a module of ours assigns to."""
    names = from_sglang(tree)
    given = {
        (id(inner), argument.arg)  # a parameter hides an import of its name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in function.args.args
        for inner in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            place = ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            place = ast.unparse(node.args[0])
        else:
            continue
        root = place.partition(".")[0]
        if root in names and (id(node), root) not in given:
            yield place


def test_nothing_is_hooked_but_through_the_list():
    wrong = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in sources_of_ours()
        for node in ast.walk(tree)
        if module != HOOKING
        and isinstance(node, ast.ImportFrom | ast.Import)
        and ("hook_registry" in ast.unparse(node) or "plugin_hook" in ast.unparse(node))
    ]
    assert not wrong


def test_nothing_of_sglang_is_assigned_but_through_the_list():
    wrong = [f"{m} assigns {place}" for m, tree in sources_of_ours() for place in assigned(tree)]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "from sglang.srt.managers import mixin\nmixin.get_spec = f",
        "from sglang.srt.managers import mixin\ncls = mixin.Mixin\ncls.add = f",
        "import sglang.srt.managers.mixin as m\nsetattr(m.Mixin, 'add', f)",
        "def g():\n    from sglang.srt.managers.mixin import Mixin\n    del Mixin.add",
    ],
)
def test_assignments_of_every_form_are_found(source):
    assert list(assigned(ast.parse(source)))


def test_every_subclass_of_sglangs_classes_is_listed():
    listed = {(p.by, p.target) for p in POINTS if p.how == How.SUBCLASSED}
    found = set()
    for module, tree in sources_of_ours():
        names = from_sglang(tree)
        by = module.removeprefix("sglang_ext.").replace(".", "/")
        bases = [b for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for b in c.bases]
        found |= {(by, names[b.id]) for b in bases if isinstance(b, ast.Name) and b.id in names}
    assert found == listed


OTHER = """
from sglang.srt.base import Base, helper
from sglang.srt.mod import function

if True:
    def function(a, b, *, c=1): ...

class Derived(Base):
    async def method(self, x, **options): ...
    def __init__(self):
        self.update = None
"""


@pytest.fixture
def other_sglang(tmp_path) -> Path:
    folder = tmp_path / "sglang" / "srt"
    folder.mkdir(parents=True)
    (folder / "mod.py").write_text(OTHER)
    (folder / "base.py").write_text("class Base:\n    def inherited(self): ...\nhelper = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("target", "takes", "wrong"),
    [
        ("mod.function", "a, b, *, c", None),
        ("mod.function", "b", "takes (a, b), no longer (b, ...)"),
        ("mod.function", "a, *, d", "has no parameter d any more"),
        ("mod.Derived.method", "self, x, *, anything", None),
        ("mod.Derived.update", "", None),
        ("mod.Derived.inherited", "self", None),
        ("mod.helper", "", None),
        ("mod.helper", "a", "is no function any more"),
        ("mod.Derived.gone", "", "Derived has no gone"),
        ("mod.gone", "", "its module has no gone"),
        ("nowhere.gone", "", "there is no module sglang.srt.nowhere"),
    ],
)
def test_what_another_version_has_no_more_is_said(other_sglang, target, takes, wrong):
    assert sources.problem(f"sglang.srt.{target}", takes, other_sglang) == wrong


def test_the_check_of_another_version_says_what_is_wrong(other_sglang, capsys):
    assert page.main(["--against", str(other_sglang)]) == 1
    said = capsys.readouterr().out
    assert "sglang.srt.disaggregation.decode.DecodePreallocQueue.add: there is no module" in said
    assert f"1 of {len(POINTS)} points are as we need them" in said  # uvicorn's
    assert page.main(["--against", str(other_sglang / "sglang")]) == 2


def test_the_page_shows_the_list():
    assert page.main(["--check"]) == 0


def test_the_pinned_version_is_the_supported_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [d.partition("==")[2] for d in project["dependencies"] if d.startswith("sglang==")]
    assert tuple(pins) == sglang_points.SUPPORTED


@pytest.fixture
def installed(monkeypatch):
    """The version that SGLang says it has."""

    def install(version: str) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    return install


def test_another_version_is_refused_in_one_line_with_what_to_do(installed):
    installed("0.5.24")
    assert hooking.refusal({}) == (
        "sglang-ext supports sglang 0.5.23, and 0.5.24 is installed: "
        "pip install sglang==0.5.23 (or set SGLANG_EXT_ANY_SGLANG=1 to try it anyway)"
    )
    assert hooking.refusal({hooking.ANY_VERSION: "1"}) is None


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+cu130"])
def test_the_supported_version_is_not_refused(installed, version):
    installed(version)
    assert hooking.refusal({}) is None


@pytest.mark.parametrize(
    "given", [["--speculative-algorithm", "sssd"], ["--speculative-algorithm=SSSD"]]
)
def test_a_start_with_our_algorithm_ends_with_that_line(installed, monkeypatch, given):
    installed("0.5.24")
    monkeypatch.setattr("sys.argv", ["sglang", *given])
    with pytest.raises(SystemExit, match=r"0\.5\.24 is installed: pip install"):
        plugin.register()


def test_a_start_without_it_goes_on_and_registers_nothing(installed, monkeypatch, caplog):
    installed("0.5.24")
    monkeypatch.setattr("sys.argv", ["sglang", "--model-path", "/m"])
    monkeypatch.setattr(HookRegistry, "register", lambda *a: pytest.fail("hooked"))
    with caplog.at_level(logging.ERROR, logger="sglang_ext.plugin"):
        plugin.register()
    assert [r.message for r in caplog.records] == [hooking.refusal({})]
