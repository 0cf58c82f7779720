"""requirements.lock, installed without resolving, holds what pyproject.toml names."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of each extra; an extra that names others of ours (all, dev) takes nothing from elsewhere by that.
NAMED = [
    named
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for named in map(Requirement, lines)
    if named.name != PROJECT["name"]
]
LOCKED = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}
# Not needed for what is used of the package, and large.
LEFT_OUT = {"onnxruntime"}


@pytest.mark.parametrize("named", NAMED, ids=lambda named: named.name)
def test_each_dependency_is_locked_at_a_version_that_pyproject_allows(named):
    locked = LOCKED[canonicalize_name(named.name)]
    (pin,) = locked.specifier
    assert pin.operator == "=="
    assert named.specifier.contains(pin.version, prereleases=True)


@pytest.mark.parametrize(
    "package",
    [
        "openai-whisper",
        "silero-vad",
        "av",
        "datasets",
        "jiwer",
        "sacrebleu",
        "matplotlib",
        "sglang-router",
        "mooncake-transfer-engine-non-cuda",
        "schemathesis",
        "check-jsonschema",
        "kubernetes-validate",
    ],
)
def test_what_a_dependency_itself_needs_is_locked(package):
    for line in importlib.metadata.requires(package) or []:
        need = Requirement(line)
        name = canonicalize_name(need.name)
        if name in LEFT_OUT or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        assert name in LOCKED, f"{package} needs {line}"
