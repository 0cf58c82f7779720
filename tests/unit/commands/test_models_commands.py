"""The command line of `models`, and that importing it is cheap."""

import argparse
import subprocess
import sys

import pytest

from sglang_ext.commands.models import add_commands
from sglang_ext.models import ModelError
from sglang_ext.models.registry import MODELS
from speech.enlarge import Enlargement


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(["models", *argv])
    return args.func(args)


def test_list_shows_every_model(tmp_path, capsys):
    assert run("list", "--cache-dir", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [[name, "no"] for name in MODELS]
    assert lines[-1] == f"in {tmp_path / 'models'}"


def test_unknown_model_is_one_line_and_exit_code_2(capsys):
    assert run("fetch", "smolm2-135m-instruct") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "did you mean 'smollm2-135m-instruct'?" in err
    assert all(name in err for name in MODELS)


def test_every_name_is_checked_before_the_first_download(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("fetched before all names were checked")

    monkeypatch.setattr("sglang_ext.commands.models.fetch", refuse)
    assert run("fetch", "whisper-base", "nonsense") == 2


@pytest.mark.parametrize(
    ("raised", "code"), [(ModelError("no network"), 1), (KeyboardInterrupt(), 130)]
)
def test_failures_have_exit_codes(monkeypatch, capsys, raised, code):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr("sglang_ext.commands.models.fetch", fail)
    assert run("fetch", "whisper-base") == code
    assert capsys.readouterr().err.startswith("sglang-ext: error: ")


def test_fetch_prints_directories_only_on_stdout(monkeypatch, capsys, tmp_path):
    calls = []

    def fake(name, cache_dir, progress, verify):
        calls.append((name, cache_dir, progress, verify))
        return tmp_path / name

    monkeypatch.setattr("sglang_ext.commands.models.fetch", fake)
    assert run("fetch", "whisper-base", "whisper-tiny.en", "--quiet", "--cache-dir", "c") == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "whisper-base"),
        str(tmp_path / "whisper-tiny.en"),
    ]
    assert calls == [("whisper-base", "c", False, False), ("whisper-tiny.en", "c", False, False)]


def test_import_pulls_in_neither_torch_nor_sglang():
    code = "import sys, sglang_ext.models; print({'torch', 'sglang', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


def test_enlarge_passes_the_sizes_on_and_prints_the_folder(monkeypatch, capsys, tmp_path):
    calls = []
    monkeypatch.setattr("speech.enlarge.enlarge", lambda *args, **kw: calls.append((args, kw)))
    target = tmp_path / "large"
    assert run("enlarge", str(tmp_path), str(target), "--decoder-layers", "24", "--quiet") == 0
    assert capsys.readouterr().out == f"{target}\n"
    how = Enlargement(width=2, encoder_layers=None, decoder_layers=24)
    assert calls == [((tmp_path, target, how), {"name": "", "progress": False})]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("whisper-bass", "did you mean 'whisper-base'?"),
        ("openai/whisper-medium", "not on this machine"),
        (".", "no config.json"),
    ],
)
def test_enlarge_names_a_source_that_will_not_do(monkeypatch, capsys, tmp_path, source, message):
    monkeypatch.chdir(tmp_path)
    assert run("enlarge", source, str(tmp_path / "large")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "large").exists()
