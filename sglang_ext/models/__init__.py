"""Models without a hub: weights that Python packages carry, turned into what SGLang loads."""

from sglang_ext.models.registry import ModelError, UnknownModelError
from sglang_ext.models.store import (
    ModelInfo,
    default_cache_dir,
    fetch,
    is_whisper,
    list_models,
    resolve,
)

__all__ = [
    "ModelError",
    "ModelInfo",
    "UnknownModelError",
    "default_cache_dir",
    "fetch",
    "is_whisper",
    "list_models",
    "resolve",
]
