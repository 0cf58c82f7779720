"""sglang-ext: speculative-decoding workers for SGLang that need no training."""

__version__ = "0.1.0"
