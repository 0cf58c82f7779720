"""Which attention backend verifies trees for which target, on CUDA.

A verify step needs a backend that honours a mask of the whole tree. Of SGLang 0.5.23's CUDA
backends FlashInfer does so for plain multi-head attention only: past a sliding window it reads
the wrong keys (flashinfer_backend.py, `update_sliding_window`), for latent attention it leaves
the mask out (flashinfer_mla_backend.py), and it knows no attention sinks and no float32. Triton
does so for all of these, but not beside an encoder's tokens. FlashAttention 3 has a tree verify
too (flashattention_backend.py, its cascade for topk > 1), which nobody has tried with us.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# In the order in which they are taken where no flag says which.
DEFAULT_BACKENDS = ("flashinfer", "triton")
# By flag only.
UNTRIED_BACKENDS = ("fa3",)
TREE_BACKENDS = DEFAULT_BACKENDS + UNTRIED_BACKENDS
# With larger pages these take a tree's nodes from wrong slots (speculative_hook.py, NGRAM).
ONE_TOKEN_PAGES = ("triton", "fa3")
# What SGLang sets for targets with attention kernels of their own, whatever the flags are.
OWN_ATTENTION = frozenset(
    {"dsa", "nsa", "qsa", "dsv4", "compressed", "minicpm_flashattn", "minicpm_flashinfer"}
)

_WINDOW = "it reads past a sliding window"
# Why a backend cannot verify trees for a target that has the fact named.
_CANNOT = {
    "flashinfer": {
        "mla": "its latent attention (MLA) leaves the tree mask out",
        "window": _WINDOW,
        "chunks": _WINDOW,
        "sinks": "it knows no attention sinks",
        "float32": "it has no kernels for --dtype float32",
    },
    "triton": {"encoder_decoder": "it has no cross-attention"},
    "fa3": {
        "encoder_decoder": "its tree verify has no cross-attention",
        "chunks": "its tree verify has no attention in chunks",
        "sinks": "its tree verify counts attention sinks twice",
        "float32": "it has no kernels for --dtype float32",
    },
}


@dataclass(frozen=True)
class TargetFacts:
    """What decides which backend can verify trees for a target.

    Attributes:
        name: the architecture, for messages.
        mla: multi-head latent attention (DeepSeek, Kimi).
        window: a sliding window in some or all layers, declared by the model's configuration.
            SGLang ignores Mistral's; such targets count all the same.
        chunks: attention within chunks of positions (Llama 4).
        sinks: learned attention sinks (gpt-oss).
        encoder_decoder: cross-attention to an encoder's tokens (Whisper).
        float32: the target computes in float32.
        own_attention: the kernels that serve it instead of a backend that can be chosen.
    """

    name: str
    mla: bool = False
    window: bool = False
    chunks: bool = False
    sinks: bool = False
    encoder_decoder: bool = False
    float32: bool = False
    own_attention: str = ""


@dataclass(frozen=True)
class BackendFlags:
    """The flags that bear on the choice.

    Attributes:
        attention: --attention-backend as the user gave it; None where SGLang chose one.
        prefill: --prefill-attention-backend, in the same way.
        decode: --decode-attention-backend, in the same way.
        page_size: tokens per page of the KV cache, as resolved so far.
        page_size_given: whether the user asked for that page size.
        deterministic: --enable-deterministic-inference, which keeps a radix cache with Triton
            but not with FlashInfer.
    """

    attention: str | None = None
    prefill: str | None = None
    decode: str | None = None
    page_size: int = 1
    page_size_given: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class BackendChoice:
    """The backends of prefills and of decode steps, and the page size that they work with.

    With two backends SGLang verifies with the one of prefills, or with the one of decode steps
    under --speculative-attention-mode decode; so both must be able to.
    """

    prefill: str
    decode: str
    page_size: int


def choose_backend(target: TargetFacts, flags: BackendFlags) -> BackendChoice:
    """The attention backends for `target`; flags are obeyed or refused, never overridden.

    Raises:
        ValueError: a flag cannot work, or no backend serves the target; one line that names
            the flag or the target and says what to do.
    """
    if target.own_attention:
        raise ValueError(
            f"{target.name} cannot be a target: it is served by {target.own_attention}, "
            "which verifies no trees; start without --speculative-algorithm"
        )
    default = _default_backend(target, flags)
    prefill = _backend_of("--prefill-attention-backend", flags.prefill, target, flags, default)
    decode = _backend_of("--decode-attention-backend", flags.decode, target, flags, default)
    if flags.deterministic and target.window and "triton" in (prefill, decode):
        raise ValueError(
            "--enable-deterministic-inference verifies no trees within sliding windows of "
            f"{target.name} with attention backend triton; leave it out"
        )
    page_size = flags.page_size
    if page_size > 1 and {prefill, decode} & set(ONE_TOKEN_PAGES):
        if flags.page_size_given:
            backend = prefill if prefill in ONE_TOKEN_PAGES else decode
            raise ValueError(
                f"--page-size {page_size}: expected 1, since attention backend {backend} "
                f"verifies trees of {target.name} in pages of one token only; "
                "leave --page-size out"
            )
        # It came with a backend that was replaced.
        page_size = 1
    return BackendChoice(prefill, decode, page_size)


def facts_of(model_config: Any, resolved: Sequence[str | None] = ()) -> TargetFacts:
    """Collect the facts about a target.

    Args:
        model_config: SGLang's ModelConfig.
        resolved: the attention backends that SGLang's own rules have come to.
    """
    import torch
    from sglang.srt.configs.model_config import AttentionArch, is_minimax_sparse

    hf, text = model_config.hf_config, model_config.hf_text_config
    own = next((f"attention backend {name}" for name in resolved if name in OWN_ATTENTION), "")
    if is_minimax_sparse(hf):
        own = "sparse attention kernels of its own"
    elif model_config.attention_arch == AttentionArch.SSM:
        own = "state-space layers without attention"
    slides = getattr(text, "use_sliding_window", True) is not False
    return TargetFacts(
        name=(hf.architectures or [hf.model_type])[0],
        mla=model_config.attention_arch == AttentionArch.MLA,
        window=bool(model_config.sliding_window_size and slides) or model_config.is_hybrid_swa,
        chunks=bool(model_config.attention_chunk_size),
        sinks=model_config.has_attention_sinks,
        encoder_decoder=model_config.is_encoder_decoder,
        float32=model_config.dtype == torch.float32,
        own_attention=own,
    )


def flags_of(server_args: Any) -> BackendFlags:
    """Collect the flags, while SGLang resolves its arguments.

    SGLang resolves attention backends before it asks the speculative algorithm
    (arg_groups/pipeline.py), so a backend that is set need not be the user's; the arguments as
    they were given are kept in `_raw_input`.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    given = cfg._raw_input

    def flag(name: str) -> Any:
        return getattr(cfg, name) if given[name] is not None else None

    return BackendFlags(
        attention=flag("attention_backend"),
        prefill=flag("prefill_attention_backend"),
        decode=flag("decode_attention_backend"),
        page_size=cfg.page_size or 1,
        page_size_given=given["page_size"] is not None,
        deterministic=cfg.enable_deterministic_inference,
    )


def resolve_backends(server_args: Any) -> BackendChoice:
    """Choose and set the attention backends and the page size in SGLang's arguments.

    Raises:
        ValueError: as choose_backend.
    """
    from sglang.srt.arg_groups.overrides import (
        attention_backends_of,
        model_config_of,
        resolving_view,
    )

    cfg = resolving_view(server_args)
    before = attention_backends_of(cfg)
    target = facts_of(model_config_of(server_args), before)
    choice = choose_backend(target, flags_of(server_args))
    server_args.attention_backend = choice.decode
    # Some of SGLang's rules set these too, and they would win.
    server_args.prefill_attention_backend = choice.prefill
    server_args.decode_attention_backend = choice.decode
    server_args.page_size = choice.page_size
    if before != (choice.prefill, choice.decode):
        logger.info(
            "Trees of %s are verified with attention backend %s; SGLang alone would take %s",
            target.name, choice.decode, before[1],
        )  # fmt: skip
    for backend in sorted({choice.prefill, choice.decode} & set(UNTRIED_BACKENDS)):
        logger.warning("Attention backend %s is untried: no GPU has run it with trees", backend)
    return choice


def prepare(attn_backend: Any, model_runner: Any) -> None:
    """Have a backend verify the loaded target's trees exactly; idempotent.

    Call it for every instance (SGLang's own and one per captured width), before its graphs are
    captured.

    Args:
        attn_backend: SGLang's AttentionBackend.
        model_runner: the target's ModelRunner.

    Raises:
        ValueError: the backend cannot; one line that says why.
    """
    from sglang_ext.cuda import encoder_tokens, flashinfer_plan, windows

    names = model_runner.prefill_attention_backend_str, model_runner.decode_attention_backend_str
    config = model_runner.model_config
    if model_runner.sliding_window_size is not None and "flashinfer" in names:
        # A window in the model's own code, of which the configuration did not tell.
        raise ValueError(
            f"--attention-backend flashinfer cannot verify trees of "
            f"{config.hf_config.architectures[0]}: {_WINDOW}; give --attention-backend triton"
        )
    if config.is_encoder_decoder:
        encoder_tokens.install(attn_backend)
    windows.install(attn_backend)
    flashinfer_plan.install(attn_backend)


def reaches_flashinfer(targets: Sequence[TargetFacts]) -> list[str]:
    """Names of those with a window, latent attention or sinks that FlashInfer would verify.

    Tried are no flag at all and every flag that asks for FlashInfer; none must get there.
    """
    asked = [
        BackendFlags(),
        BackendFlags(attention="flashinfer"),
        BackendFlags(prefill="flashinfer"),
        BackendFlags(decode="flashinfer"),
        BackendFlags(page_size=16, page_size_given=True),
    ]
    return [
        target.name
        for target in targets
        if (target.mla or target.window or target.chunks or target.sinks)
        and any("flashinfer" in _chosen(target, flags) for flags in asked)
    ]


def _chosen(target: TargetFacts, flags: BackendFlags) -> tuple[str, ...]:
    """The backends chosen; none where the start is refused."""
    try:
        choice = choose_backend(target, flags)
    except ValueError:
        return ()
    return choice.prefill, choice.decode


def _default_backend(target: TargetFacts, flags: BackendFlags) -> str:
    """The backend where no flag says which; empty if none can serve the target."""
    order = reversed(DEFAULT_BACKENDS) if flags.deterministic else DEFAULT_BACKENDS
    return next((backend for backend in order if not _why_not(backend, target)), "")


def _backend_of(
    flag: str, given: str | None, target: TargetFacts, flags: BackendFlags, default: str
) -> str:
    """The backend of one of the two phases, from its own flag or from the one for both."""
    if given is None:
        flag, given = "--attention-backend", flags.attention
    if given is None:
        if default:
            return default
        reasons = "; ".join(f"{name}: {_why_not(name, target)}" for name in DEFAULT_BACKENDS)
        raise ValueError(f"{target.name} cannot be a target: no backend verifies it ({reasons})")
    advice = f"leave {flag} out to get {default}" if default else "no other backend can either"
    if given not in TREE_BACKENDS:
        raise ValueError(
            f"{flag} {given}: expected one that verifies trees ({', '.join(TREE_BACKENDS)}); "
            f"{advice}"
        )
    if reason := _why_not(given, target):
        raise ValueError(f"{flag} {given} cannot verify trees of {target.name}: {reason}; {advice}")
    return given


def _why_not(backend: str, target: TargetFacts) -> str:
    """Why `backend` cannot verify trees for `target`; empty if it can."""
    return next((why for fact, why in _CANNOT[backend].items() if getattr(target, fact)), "")
