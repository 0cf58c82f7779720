"""Reading CTranslate2 files, whole ones and damaged ones."""

import struct

import numpy as np
import pytest

from speech.ctranslate2 import read_model
from tests.unit.speech.ctranslate2_files import model_file, string

ARRAYS = {
    "a/weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "a/bias": np.array([1.5, -2.5], dtype=np.float32),
    "heads": np.array(8, dtype=np.int16),
    "flag": np.array(-1, dtype=np.int8),
}


def write(tmp_path, content: bytes):
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("version", [5, 6])
def test_reads_back_what_was_written(tmp_path, version):
    model = read_model(write(tmp_path, model_file(ARRAYS, {"b": "a/weight"}, version=version)))
    assert (model.spec, model.revision) == ("WhisperSpec", 3)
    assert list(model.variables) == [*ARRAYS, "b"]
    for name, array in ARRAYS.items():
        assert model.variables[name].dtype == array.dtype
        np.testing.assert_array_equal(model.variables[name], array)
    assert model.variables["b"] is model.variables["a/weight"]


def test_every_truncation_is_told(tmp_path):
    content = model_file(ARRAYS, {"b": "a/weight"})
    for length in range(len(content)):
        with pytest.raises(ValueError, match="damaged"):
            read_model(write(tmp_path, content[:length]))


def test_bytes_after_the_end_are_told(tmp_path):
    with pytest.raises(ValueError, match="1 bytes after the last alias"):
        read_model(write(tmp_path, model_file(ARRAYS) + b"\0"))


def test_random_damage_is_read_or_told_but_never_crashes(tmp_path):
    content = bytearray(model_file(ARRAYS, {"b": "a/weight"}))
    random = np.random.default_rng(0)
    told = 0
    for _ in range(500):
        damaged = content.copy()
        damaged[random.integers(len(damaged))] = random.integers(256)
        try:
            read_model(write(tmp_path, bytes(damaged)))
        except ValueError as error:
            assert str(tmp_path) in str(error)
            told += 1
    assert told > 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF" + bytes(60), "binary version"),
        (model_file({}, version=4), "binary version 4, expected 5 or 6"),
        (model_file({}, {"b": "a"}), "alias 'b' of 'a', which is not there"),
        (
            struct.pack("<I", 6) + string("S") + struct.pack("<II", 1, 1) + string("x")
            + struct.pack("<BIBI", 1, 2**31, 5, 2**32 - 1),
            "x has data type 5",
        ),
        (
            struct.pack("<I", 6) + string("S") + struct.pack("<II", 1, 1) + string("x")
            + struct.pack("<BIBI", 1, 3, 0, 8) + bytes(8),
            r"x of shape \(3,\) and float32 cannot take 8 bytes",
        ),
    ],
)  # fmt: skip
def test_wrong_content_is_named(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_model(write(tmp_path, content))
