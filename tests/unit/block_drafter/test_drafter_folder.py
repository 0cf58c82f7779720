"""A drafter's directory: what is written is read again, and nothing else is."""

import errno
import json
import os

import pytest
import torch

from sglang_ext.block_drafter import drafter_files
from sglang_ext.block_drafter.drafter_files import load_drafter, save_drafter
from sglang_ext.block_drafter.drafter_manifest import (
    NAME,
    BlockDrafterError,
    check_target,
    is_drafter_folder,
    read_manifest,
    target_name,
)
from tests.unit.block_drafter.toy_drafters import manifest, repeating, training_set, untrained


@pytest.fixture
def folder(tmp_path):
    model, kept = untrained()
    data = repeating(40, namespace="tenant-a")
    stated = manifest(data, training_set(data)[1], kept.outputs)
    save_drafter(tmp_path / "d", stated, model, kept)
    return tmp_path / "d"


def test_a_directory_is_read_as_it_was_written(folder):
    loaded = load_drafter(folder)
    assert is_drafter_folder(folder)
    assert loaded.manifest.namespaces == {"tenant-a": loaded.manifest.data["output_tokens"]}
    assert loaded.manifest.source.before == (5, 6) and loaded.manifest.source.after == (7,)
    again = read_manifest(folder)
    assert again == loaded.manifest
    assert sorted(os.listdir(folder)) == [NAME, "model.safetensors"]


def test_another_targets_drafter_is_refused_by_name(folder):
    stated = read_manifest(folder)
    check_target(folder, stated, "repeater", "0123456789abcdef")
    check_target(folder, stated, "", "")
    with pytest.raises(BlockDrafterError, match=r"trained for repeater, not for other"):
        check_target(folder, stated, "other", "0123456789abcdef")
    with pytest.raises(BlockDrafterError, match=r"repeater, whose tokenizer is another"):
        check_target(folder, stated, "repeater", "f" * 16)
    assert target_name("/models/repeater/") == target_name("me/repeater") == "repeater"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format", 2, "format 2, and this version reads 4: train it again"),
        ("kind", "eagle", "kind 'eagle'"),
        ("weights", "abc", "SHA-256"),
        ("vocab_size", 0, "vocab_size"),
        ("ends", [-1], "ends"),
        ("shape", {"width": 3}, "shape"),
        ("target", None, "target"),
    ],
)
def test_a_damaged_manifest_is_refused_in_one_line(folder, field, value, said):
    content = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps({**content, field: value}))
    with pytest.raises(BlockDrafterError, match=said) as caught:
        load_drafter(folder)
    assert NAME in str(caught.value) and "\n" not in str(caught.value)


def test_a_manifest_that_is_no_json_or_not_there_is_refused(folder):
    (folder / NAME).write_text("{")
    with pytest.raises(BlockDrafterError, match="not JSON"):
        load_drafter(folder)
    (folder / NAME).unlink()
    with pytest.raises(BlockDrafterError, match="no drafter's directory"):
        load_drafter(folder)


def test_damaged_weights_are_refused(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BlockDrafterError, match="checksum"):
        load_drafter(folder)
    path.unlink()
    with pytest.raises(BlockDrafterError, match="cannot read"):
        load_drafter(folder)


def test_weights_of_another_shape_are_refused(folder):
    content = json.loads((folder / NAME).read_text())
    content["shape"]["decoder_layers"] = 2
    (folder / NAME).write_text(json.dumps(content))
    with pytest.raises(BlockDrafterError, match="does not fit") as caught:
        load_drafter(folder)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line_and_leaves_the_old_drafter(folder, monkeypatch):
    before = read_manifest(folder)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(drafter_files.os, "fsync", full)
    model, kept = untrained()
    torch.nn.init.ones_(model.output_bias)
    with pytest.raises(BlockDrafterError, match="No space left on device"):
        save_drafter(folder, before, model, kept)
    assert load_drafter(folder).manifest == before
    assert sorted(os.listdir(folder)) == [NAME, "model.safetensors"]
