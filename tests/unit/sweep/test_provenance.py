"""Where a sweep was measured."""

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

from sglang_ext.sweep import provenance


def test_it_is_json_and_names_versions_and_machine():
    found = json.loads(json.dumps(provenance.collect()))
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["sglang"] and found["versions"]["torch"]
    assert found["cpu"] and found["cores"] >= 1 and found["threads"] >= 1
    assert found["memory_gb"] > 0


def test_changes_are_those_that_matter():
    before = provenance.collect()
    assert provenance.changes(before, before | {"started": "later"}) == []
    assert provenance.changes(before, before | {"threads": 99}) == [
        f"threads: {before['threads']} before, 99 now"
    ]


def test_a_commit_beside_the_package_changes_nothing(tmp_path):
    def commit(file):
        (tmp_path / file).write_text("text")
        git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", file]):
            subprocess.run([*git, *command], cwd=tmp_path, check=True)

    package = tmp_path / "package"
    package.mkdir()
    assert provenance.checked_out(package) == {"commit": None, "package": None}
    commit("package/a")
    first = provenance.checked_out(package)
    commit("docs")
    second = provenance.checked_out(package)
    assert first["commit"] != second["commit"] and first["package"] == second["package"]
    assert provenance.changes(first, second) == []
    (tmp_path / "docs").write_text("edited")
    edited = provenance.checked_out(package)
    assert edited == {"commit": f"{second['commit']}+", "package": second["package"]}
    (package / "a").write_text("edited")
    assert len(provenance.changes(first, provenance.checked_out(package))) == 1
    commit("package/b")
    assert len(provenance.changes(first, provenance.checked_out(package))) == 1


def test_what_servers_run_is_compared_whole():
    found = provenance.collect()
    if found["commit"] is None:
        pytest.skip("not a checkout")
    root = Path(provenance.__file__).parents[2]
    for folder in ("sglang_ext", "datastores", "speech"):
        tree = provenance.checked_out(root / folder)["package"]
        assert tree and tree in found["package"].split()


def test_forward_costs_are_the_models_newest_last(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_EXT_CACHE", str(tmp_path))
    assert provenance.forward_costs("/m") == []
    folder = tmp_path / "knee"
    folder.mkdir()
    for name, model, when in (("a", "/m", 300), ("b", "/m", 200), ("c", "/other", 400)):
        content = {"for": {"model": model}, "I_knee": when, "seconds": {"1": 0.1}}
        (folder / f"{name}.json").write_text(json.dumps(content))
        os.utime(folder / f"{name}.json", (when, when))
    (folder / "d.json").write_text("{")
    assert [costs["I_knee"] for costs in provenance.forward_costs("/m")] == [200, 300]
