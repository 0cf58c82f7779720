"""The flags that a CPU server gets by default."""

import argparse
import json
from dataclasses import dataclass

import pytest

from sglang_ext.cpu import defaults

LLAMA = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
WHISPER = {"encoder_layers": 6, "decoder_layers": 6, "d_model": 512, "num_hidden_layers": 6}


@dataclass
class Free:
    available: int


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")


def model_in(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def flags(argv, weights="fp32"):
    added = defaults.default_cpu_args(argv, weights)
    return {a: b for a, b in zip(added, [*added[1:], "--"], strict=True) if a.startswith("--")}


def test_all_that_a_server_needs(tmp_path):
    given = flags(["--model-path", model_in(tmp_path, LLAMA)])
    assert given["--device"] == "cpu"
    assert given["--dtype"] == "float32"
    assert given["--attention-backend"] == "tree_cpu"
    assert "--sleep-on-idle" in given and "--disable-overlap-schedule" in given


def test_encoder_input_is_not_split(tmp_path):
    assert flags(["--model", model_in(tmp_path, WHISPER)])["--chunked-prefill-size"] == "-1"
    assert "--chunked-prefill-size" not in flags(["--model", model_in(tmp_path, LLAMA)])


def test_what_the_user_says_stays():
    argv = ["--dtype=float32", "--max-total-tokens", "77", "--attention-backend", "torch_native"]
    given = flags([*argv, "--sleep-on-idle"])
    assert not {"--dtype", "--max-total-tokens", "--attention-backend"} & set(given)
    assert "--sleep-on-idle" not in given
    assert flags(["--dtype", "bfloat16"])["--attention-backend"] == "torch_native"
    assert defaults.default_cpu_args(["--device", "cuda"]) == []


def test_a_pool_of_16_bits_holds_twice_as_many_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda: Free(1 << 30))
    model = ["--model-path", model_in(tmp_path, LLAMA)]
    whole = int(flags(model)["--max-total-tokens"])
    for dtype, times in (("auto", 1), ("bf16", 2), ("bfloat16", 2)):
        held = int(flags([*model, "--kv-cache-dtype", dtype])["--max-total-tokens"])
        assert held == pytest.approx(times * whole, abs=1)


@pytest.mark.parametrize(
    "weights, more, kept",
    [
        ("fp32", [], None),
        ("bf16", [], None),
        ("int8", [], "bf16"),
        ("int4", [], "bf16"),
        ("int4", ["--attention-backend", "torch_native"], None),
        ("int4", ["--kv-cache-dtype=auto"], None),
    ],
)
def test_k_and_v_are_rounded_where_weights_are(tmp_path, monkeypatch, weights, more, kept):
    monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda: Free(1 << 30))
    argv = ["--model-path", model_in(tmp_path, LLAMA), *more]
    given = flags(argv, weights)
    assert given.get("--kv-cache-dtype") == kept
    whole = int(flags(argv)["--max-total-tokens"])
    times = 1 if kept is None else 2
    assert int(given["--max-total-tokens"]) == pytest.approx(times * whole, abs=1)


def test_whispers_k_and_v_stay_float32(tmp_path):
    given = flags(["--model-path", model_in(tmp_path, WHISPER)], "int4")
    assert "--kv-cache-dtype" not in given


def test_nothing_on_a_gpu(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert defaults.default_cpu_args(["--model-path", "x"]) == []


def test_kv_cache_fits_the_memory(tmp_path, monkeypatch):
    assert defaults.kv_bytes_per_token(LLAMA) == 2 * 30 * 3 * 64 * 4
    assert defaults.kv_bytes_per_token(WHISPER) == 2 * 18 * 512 * 4
    argv = [f"--model-path={model_in(tmp_path, LLAMA)}"]

    def free(size):
        monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda: Free(size))

    free(2 << 30)
    assert defaults.kv_tokens(argv) == (2 << 30) // 4 // 46080
    free(1 << 40)
    assert defaults.kv_tokens(argv) == 65_536
    free(1 << 20)
    assert defaults.kv_tokens(argv) == 4_096
    assert defaults.kv_tokens(["--model-path", "someone/some-model"]) == 16_384
    (tmp_path / "config.json").write_text("not json")
    assert defaults.kv_tokens(argv) == 16_384


def test_sglang_knows_every_flag():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert set(flags(["--speculative-algorithm", "SSSD"])) <= known
