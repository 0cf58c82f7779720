"""The wheel holds what the product reads, and what is imported is declared."""

import ast
import importlib.metadata
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sglang_ext
from scripts import check_wheel
from scripts.lib.import_layers import FORBIDDEN, files_of, imports_in
from sglang_ext import extras
from sglang_ext.cli import main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"sglang_ext", "speech", "datastores"}
# Not an extra: built by hand (docs/peers.md).
BY_HAND = {"arctic_inference"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    return zipfile.ZipFile(check_wheel.build(tmp_path_factory.mktemp("dist")))


def test_the_wheel_carries_data_licences_and_type_markers(wheel):
    assert check_wheel.missing_files(wheel.namelist()) == []


def test_the_wheel_holds_our_three_packages_alone_at_the_stated_version(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    (info,) = tops - OURS
    assert info == f"sglang_ext-{sglang_ext.__version__}.dist-info"


def test_a_file_that_a_wheel_lacks_is_named():
    names = [*check_wheel.FILES, "x.dist-info/licenses/LICENSE"]
    assert check_wheel.missing_files(names) == [".dist-info/licenses/NOTICE"]
    assert "speech/py.typed" in check_wheel.missing_files([])


def needs_of(name: str, found: set[str]) -> set[str]:
    """A distribution and all that it installs, extras apart."""
    if name not in found:
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return found
        for need in map(Requirement, lines):
            if not need.marker or need.marker.evaluate({"extra": ""}):
                needs_of(canonicalize_name(need.name), found)
    return found


def test_what_is_imported_is_named_or_comes_with_sglang():
    groups = (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    declared = {canonicalize_name(Requirement(line).name) for lines in groups for line in lines}
    reached = declared | needs_of("sglang", set())
    owners = importlib.metadata.packages_distributions()
    imported = {
        name.partition(".")[0]
        for package in FORBIDDEN
        for path in files_of(package)
        for name in imports_in(path)
    }
    undeclared = {
        name
        for name in imported - OURS - BY_HAND - set(sys.stdlib_module_names)
        if not reached & {canonicalize_name(owner) for owner in owners.get(name, [])}
    }
    assert not undeclared


def test_a_package_of_an_extra_is_no_dependency_of_serving():
    named = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert not named & {"matplotlib", "jiwer", "av", "openai-whisper", "silero-vad"}


def test_each_extra_that_is_checked_exists():
    assert set(extras.MODULES) <= set(PROJECT["optional-dependencies"])
    every = PROJECT["optional-dependencies"]["all"][0]
    assert Requirement(every).extras == set(extras.MODULES)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["transcribe", "talk.wav"], "speech"),
        (["captions", "talk.wav"], "speech"),
        (["serve", "--model", "whisper-base"], "speech"),
        (["sweep", "--out", "out"], "sweep"),
        (["sweep", "--out", "out", "--model", "whisper-base"], "sweep,speech"),
        (["sweep", "report", "out"], "sweep"),
    ],
)
def test_a_command_without_its_extra_says_so_in_one_line(command, named, monkeypatch, capsys):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr("sglang_ext.cli.models.resolve", lambda name: name)
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"pip install 'sglang-ext[{named}]'")


def test_a_text_model_needs_no_extra(monkeypatch):
    from sglang_ext.options import Options
    from sglang_ext.preflight import check_launch

    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    check_launch(["--model-path", "smollm2-135m-instruct", "--port", "18999"], Options())


def test_modules_of_extras_are_imported_where_they_are_used_only():
    """What `sglang-ext serve` of a text model imports names none of them outside functions."""
    heads = [ROOT / "sglang_ext" / name for name in ("cli.py", "plugin.py", "worker.py")]
    heads += (ROOT / "sglang_ext" / "commands").rglob("*.py")
    optional = {name for names in extras.MODULES.values() for name in names}
    for path in heads:
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not optional & {name.partition(".")[0] for name in names}, path


def test_the_package_looks_for_data_nowhere_beside_the_checkout():
    for package in OURS:
        for path in files_of(package):
            assert not re.search(r'"shared"\s*/\s*"data"|shared/data', path.read_text()), path
