"""The SGLang flags that a server on a CPU needs and that its user should not have to know."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from sglang_ext.cpu.install import wants_cpu_engine
from sglang_ext.servers.flags import flag_value

# The KV pool may take this part of the free memory, and never more tokens than this: long contexts
# are slow on a CPU well before that, and what is not used still counts against other programs.
_KV_SHARE = 0.25
_MOST_TOKENS = 65_536
_FEWEST_TOKENS = 4_096
# Where the model's shape is not known before SGLang has fetched it.
_TOKENS_OF_UNKNOWN = 16_384
_HALF = ("bf16", "bfloat16")
ROUNDED = ("int8", "int4")
"""Of `--cpu-weights`, what rounds a checkpoint's weights: K and V are rounded to bfloat16 too."""

# argparse accepts both, and SGLang documents both.
_MODEL_FLAGS = ("--model-path", "--model")


def default_cpu_args(argv: Sequence[str], weights: str = "fp32") -> list[str]:
    """The flags to add to SGLang's own `argv`; none on a GPU, and none that the user has given.

    Args:
        argv: SGLang's arguments, without the program's name.
        weights: what `--cpu-weights` is.
    """
    if not wants_cpu_engine() or flag_value(argv, "--device") not in (None, "cpu"):
        return []
    defaults: dict[str, str | None] = {
        # Without it SGLang looks for an accelerator and stops where there is none.
        "--device": "cpu",
        # bf16 has no fast path without AMX, and float32 makes greedy output reproducible.
        "--dtype": "float32",
        # SGLang's scheduler otherwise polls: an idle server keeps a core busy.
        "--sleep-on-idle": None,
        # There is no second stream to overlap with (same speed, measured), SGLang turns it off for
        # speculation on CPUs, and with it SGLang's penalties are one token late.
        "--disable-overlap-schedule": None,
        # SGLang reserves 6.5 GB for GPU buffers and finds no room for the model in 8 GB.
        "--mem-fraction-static": "0.85",
    }
    if flag_value(argv, "--dtype") in (None, "auto", "float", "float32"):
        # The backend that knows draft trees; it works in float32 only.
        defaults["--attention-backend"] = "tree_cpu"
    else:
        # SGLang's default for CPUs needs AMX.
        defaults["--attention-backend"] = "torch_native"
    encodes = "encoder_layers" in _model_config(argv)
    backend = flag_value([*_as_argv(defaults), *argv], "--attention-backend")
    if weights in ROUNDED and not encodes and backend == "tree_cpu":
        # Beside such weights a step spends a fifth of its time on reading K and V in float32.
        defaults["--kv-cache-dtype"] = _HALF[0]
    # SGLang otherwise turns what memory is left into KV cache, all of it.
    half = flag_value([*_as_argv(defaults), *argv], "--kv-cache-dtype") in _HALF
    defaults["--max-total-tokens"] = str(kv_tokens(argv, 2 if half else 4))
    if encodes:
        # SGLang 0.5.23 stops with an assertion where a chunk ends within an encoder's input, as it
        # does when three Whisper requests come at once (1,500 tokens each, 4,096 in a chunk).
        defaults["--chunked-prefill-size"] = "-1"
    if flag_value(argv, "--disaggregation-mode") == "decode":
        # SGLang's default keeps what is retracted in memory that CUDA has pinned.
        defaults["--disaggregation-decode-retraction-backup"] = "cpu_tensor"
    return _as_argv({flag: value for flag, value in defaults.items() if not _has(argv, flag)})


def kv_tokens(argv: Sequence[str], element_bytes: int = 4) -> int:
    """How many tokens the KV pool should hold, from the model's shape and the free memory."""
    try:
        per_token = kv_bytes_per_token(_model_config(argv), element_bytes)
    except (KeyError, TypeError):
        return _TOKENS_OF_UNKNOWN
    affordable = int(psutil.virtual_memory().available * _KV_SHARE / per_token)
    return max(_FEWEST_TOKENS, min(_MOST_TOKENS, affordable))


def _model_config(argv: Sequence[str]) -> dict[str, Any]:
    """The model's config.json; empty where there is none yet, or none that can be read."""
    model = flag_value(argv, *_MODEL_FLAGS)
    config = Path(model or "") / "config.json"
    if model is None or not config.is_file():
        return {}
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # SGLang reads the file next, and says what is wrong with it
    return content if isinstance(content, dict) else {}


def kv_bytes_per_token(config: dict[str, Any], element_bytes: int = 4) -> int:
    """Bytes of K and V that one token takes, from a Hugging Face config.json.

    Args:
        element_bytes: of a number: 4 for float32, 2 for bfloat16.

    Raises:
        KeyError: where the shape is not stated.
    """
    config = config.get("text_config", config)
    if "encoder_layers" in config:
        # SGLang's Whisper numbers encoder, self- and cross-attention layers one after another.
        layers = config["encoder_layers"] + 2 * config["decoder_layers"]
        return 2 * layers * config["d_model"] * element_bytes
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * config["num_hidden_layers"] * kv_heads * size * element_bytes


def _as_argv(flags: Mapping[str, str | None]) -> list[str]:
    return [part for pair in flags.items() for part in pair if part is not None]


def _has(argv: Sequence[str], flag: str) -> bool:
    return any(argument == flag or argument.startswith(flag + "=") for argument in argv)
