"""`sglang-ext ops`: the pack is whole, is written whole, and what is there is left alone."""

import argparse
import dataclasses
import re
import sys
from pathlib import Path

import pytest

from sglang_ext import options
from sglang_ext.cli import main
from sglang_ext.commands import ops

# Flags of pip, useradd, install and HEALTHCHECK in the Dockerfile.
_OF_OTHERS = """
--format --no-cache-dir --constraint --uid --create-home --home-dir --directory --owner --mode
--interval --timeout --start-period --retries
"""
PACK = Path(ops.__file__).with_name("pack")


def test_the_list_names_every_file_of_the_pack(capsys):
    assert main(["ops", "list"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed == set(ops.FILES) == {path.name for path in PACK.iterdir()}


def test_all_of_it_is_written_to_a_new_folder(tmp_path, capsys):
    folder = tmp_path / "a" / "b"
    assert main(["ops", "write", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == set(ops.FILES)
    assert capsys.readouterr().out.splitlines() == [str(folder / name) for name in ops.FILES]
    for name in ops.FILES.keys() - {"sglang-ext.service"}:
        assert (folder / name).read_text() == (PACK / name).read_text()


def test_some_of_it_can_be_written(tmp_path):
    assert main(["ops", "write", str(tmp_path), "alerts.yaml"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["alerts.yaml"]


def test_what_is_there_is_left_alone_and_nothing_else_is_written(tmp_path, capsys):
    mine = tmp_path / "alerts.yaml"
    mine.write_text("mine")
    assert main(["ops", "write", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(mine) in line and "--force" in line
    assert mine.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    assert main(["ops", "write", str(tmp_path), "--force"]) == 0
    assert mine.read_text() != "mine"


def test_a_file_that_the_pack_lacks_is_named(tmp_path, capsys):
    assert main(["ops", "write", str(tmp_path / "new"), "helm.yaml"]) == 2
    error = capsys.readouterr().err
    assert "'helm.yaml'" in error and "kubernetes.yaml" in error
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["ops", "write", str(tmp_path / "file" / "ops")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_unit_starts_the_command_that_wrote_it(tmp_path):
    ops.write(tmp_path, ["sglang-ext.service"])
    unit = (tmp_path / "sglang-ext.service").read_text()
    (started,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    command = started.removeprefix("ExecStart=").split()[0]
    assert Path(command).parent == Path(sys.executable).parent and "@" not in unit


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml", "Dockerfile"])
def test_every_way_to_start_a_server_shows_its_metrics_and_keeps_its_datastore(name):
    text = ops.read(name)
    for said in ("--enable-metrics", "--datastore", "/data/store", "SSSD"):
        assert said in text, said


@pytest.mark.parametrize(
    "name", ["compose.yaml", "kubernetes.yaml", "Dockerfile", "sglang-ext.service"]
)
def test_flags_and_variables_are_ones_that_there_are(name):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    ServerArgs.add_cli_args(parser)
    options.add_flags(parser)
    lines = ops.read(name).splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    server = text.partition("  prometheus:")[0]  # of compose.yaml; the others have no such line
    flags = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*", server)) - set(_OF_OTHERS.split())
    assert "--model" in flags and all(flag in parser._option_string_actions for flag in flags)
    variables = set(re.findall(r"SGLANG_EXT_[A-Z_]+", text)) - {"SGLANG_EXT_CACHE"}
    fields = dataclasses.fields(options.Options)
    assert variables <= {options.env_name(field.name) for field in fields}
