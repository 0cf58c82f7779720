"""SGLang on CPUs without AMX: what it lacks there, and what makes it fast.

`install.install()` runs before SGLang is imported; `register()` runs in every process of SGLang.
"""


def register() -> None:
    """Register the attention backend, packed linear layers and CPU operators with SGLang."""
    from sglang_ext.cpu import (
        attention,
        greedy_sampler,
        kv_pool,
        kv_store,
        linear,
        rotary,
        whisper_encoder,
    )
    from sglang_ext.disaggregation import on_cpu

    attention.register()
    linear.register()
    rotary.register()
    whisper_encoder.register()
    kv_store.register()
    kv_pool.register()
    greedy_sampler.register()
    on_cpu.register()
