"""The server's pool of audio decoders, and the threads that wait for them."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

from sglang_ext.options import Options
from speech.decoders import DecoderPool

_CUTTING = 4  # threads for audio that is decoded already


@cache
def pool() -> DecoderPool:
    """The pool of this process, as the options say."""
    options = Options.from_env()
    return DecoderPool(
        options.audio_decoders,
        options.audio_queue,
        options.audio_decoder_memory_mb,
        options.audio_decoder_seconds,
    )


@cache
def threads() -> ThreadPoolExecutor:
    """Threads for what waits for the pool: never fewer than may wait, so that none waits here."""
    options = Options.from_env()
    return ThreadPoolExecutor(
        options.audio_decoders + options.audio_queue + _CUTTING,
        thread_name_prefix="sglang-ext-audio",
    )
