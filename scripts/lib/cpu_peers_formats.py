"""Parts `formats`, `lossless-FORM` and `memory` of scripts.bench_cpu_peers: forms of weights."""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts import bench_decode, check_lossless
from scripts.lib.client import generate
from scripts.lib.cpu_peers_asr import PARAMS, PLAIN, TARGET
from scripts.lib.cpu_peers_common import UsageError, weights_flags
from scripts.lib.spec_bench import spec_bench
from scripts.lib.speech_client import Speech, transcribe_all
from scripts.speech_data import read_clips
from sglang_ext.servers.processes import free_port
from sglang_ext.servers.server_process import ServerProcess
from sglang_ext.servers.started_server import serve_command

EXACT = "fp32"
FORMS = (EXACT, "bf16", "int8", "int4")
_PROMPTS, _QUICK_PROMPTS = 26, 8
_TOKENS, _QUICK_TOKENS = 128, 64
_MIB = 1 << 20
# What a server is asked before its memory is read: enough to have made all that it makes once.
_ASKED = 8


def format_figures(options: argparse.Namespace) -> dict[str, float]:
    """decode_ratio_FORM and perplexity_ratio_FORM; see scripts.bench_decode --formats."""
    quick = options.quick
    prompts = spec_bench(options.model, max_prompt_tokens=512)
    return bench_decode.compare_formats(
        options.model,
        prompts[: _QUICK_PROMPTS if quick else _PROMPTS],
        _QUICK_TOKENS if quick else _TOKENS,
        bench_decode.QUICK_SCORED_TEXTS if quick else bench_decode.SCORED_TEXTS,
    )


def lossless_part(form: str) -> Callable[[argparse.Namespace], dict[str, float]]:
    """The part that compares speculative output with plain output in this form of weights."""

    def figures(options: argparse.Namespace) -> dict[str, float]:
        prompts = check_lossless.prompts_of(options.model, quick=options.quick)
        found = check_lossless.lossless_figures(options.model, prompts, check_lossless.TOKENS, form)
        return {f"{name}_{form}": value for name, value in found.items()}

    return figures


def memory_figures(options: argparse.Namespace) -> dict[str, float]:
    """memory_mib_NAME_FORM of served models, and their ratios; see scripts.bench_cpu_peers.

    One server at a time, as `sglang-ext serve` starts it without further flags, all of its
    processes; pages that they share count once.

    Raises:
        UsageError: the form of the weights is not known, or --memory-before is no checkout.
    """
    before = options.memory_before
    if before is not None and not Path(before, "sglang_ext", "cli.py").is_file():
        raise UsageError(f"--memory-before {before}: this is no checkout of sglang-ext")
    figures: dict[str, float] = {}
    for name, form, read in (
        ("smollm2", options.llm_weights, lambda *kind: _text_mib(options.model, *kind)),
        ("whisper", options.asr_weights, lambda *kind: _speech_mib(options, *kind)),
    ):
        mib = {kind: read(kind, None) for kind in (EXACT, form)}
        if before is not None:
            mib["before"] = read("", before)
        for kind, value in mib.items():
            print(f"{name} {kind}: {value:.0f} MiB", flush=True)
            figures[f"memory_mib_{name}_{kind}"] = value
        figures[f"memory_ratio_{name}_by_fp32"] = mib[form] / mib[EXACT]
        if before is not None:
            figures[f"memory_ratio_{name}"] = mib[form] / mib["before"]
    return figures


def _text_mib(model: str, form: str, checkout: Path | None) -> float:
    prompts = spec_bench(model, max_prompt_tokens=160)[:_ASKED]
    flags = weights_flags(form, "--llm-weights")
    with _DefaultServer(model, flags, checkout) as server:
        for prompt in prompts:
            generate(server.url, prompt.input_ids, max_new_tokens=_QUICK_TOKENS)
        return server.memory_bytes() / _MIB


def _speech_mib(options: argparse.Namespace, form: str, checkout: Path | None) -> float:
    speech = [Speech.of(clip) for clip in read_clips(options.audio)[:_ASKED]]
    flags = weights_flags(form, "--asr-weights")
    with _DefaultServer(TARGET, flags, checkout) as server:
        transcribe_all(server.url, speech, PARAMS[PLAIN])
        return server.memory_bytes() / _MIB


class _DefaultServer(ServerProcess):
    """A server with the default KV pool, of this checkout's code or of another's."""

    def __init__(self, model: str, flags: Sequence[str], checkout: Path | None) -> None:
        port = free_port()
        # Without the safe path the folder it starts in, this checkout, would come first.
        other = {} if checkout is None else {
            "PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1",
        }  # fmt: skip
        super().__init__(
            "memory", serve_command(model, port, flags), f"http://127.0.0.1:{port}",
            Path(tempfile.mkstemp(prefix="sglang-memory-", suffix=".log")[1]), env=other,
        )  # fmt: skip
