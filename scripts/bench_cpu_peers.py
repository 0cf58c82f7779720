"""Our CPU engine beside what a CPU user would take instead: faster-whisper and llama.cpp.

`make peers` builds these in an environment of their own. All engines are up together and take
turns, on all physical cores, with the same weights: the files that the registry's checkpoints are
made from. Ours are servers asked over HTTP, and all of their processes' CPU time counts; the peers
are libraries in one process. Figures by part:

asr: whisper-base, greedy, beam 1, English, without timestamps and VAD. asr_cpu_ratio and
    asr_wall_ratio are our time (SpecASR, as it is served) by faster-whisper int8's, clips one by
    one; ..._eight_at_once with eight in flight (there: one batch of eight); ..._plain without
    speculation. asr_wer_*: word error rates; asr_wer_points_above_fp32 with --asr-weights.
llm: MT-Bench and GSM8K, outputs of 48 to 96 tokens unless they end before.
    llm_ratio_vs_llamacpp_NAME is our tokens/s by those of llama.cpp without lookup, prompts too,
    at batch 1, ..._batch8 at batch 8 (there: eight sequences, batched continuously): of plain
    SGLang, of SSSD cold (an empty datastore) and warm (answers to other prompts, and those that it
    serves). llamacpp_lookup_ratio: its n-gram lookup by its plain decoding. llm_mismatches: of
    workloads and batch sizes, those where SSSD's outputs are not plain SGLang's.
formats: decode_ratio_FORM and perplexity_ratio_FORM by float32's, see scripts.bench_decode.
lossless-FORM: mismatches_FORM of speculative and plain output, see scripts.check_lossless.
verify: verify_overhead, the time of a verify step of 12 nodes at batch 1 by that of its linear
    layers and attention alone.
shared: shared_core_ratio_N_busy, what is left of the speed beside N busy processes, see
    scripts.bench_shared_cores.
memory: memory_ratio_smollm2 and memory_ratio_whisper, of servers with weights in this form and
    else the defaults by those of the code in --memory-before, a checkout of an earlier commit, in
    float32, all processes; ..._by_fp32 by this code's own in float32.

..._error_percent: how far off a ratio may be, with 95% probability, by its scatter.

What a part has found is in FILE as soon as it ends, beside what FILE had of other parts: they may
run one by one, and again. Limits that figures in FILE do not keep are said in a line each, and the
exit code is 1.

    python -m scripts.bench_cpu_peers [--parts PART,PART] [--audio DIR] [--quick]
        [--asr-weights FORM] [--llm-weights FORM] [--peers PYTHON] [--model M]
        [--memory-before DIR] [--json FILE] [--docs DIR]
"""

import argparse
import json
import sys
from pathlib import Path

from scripts.bench_shared_cores import shared_core_figures
from scripts.lib.check_parts import Part, figures_of, parts_of
from scripts.lib.cpu_peers_asr import asr_figures
from scripts.lib.cpu_peers_common import UsageError, weights_flags
from scripts.lib.cpu_peers_formats import FORMS, format_figures, lossless_part, memory_figures
from scripts.lib.cpu_peers_limits import broken
from scripts.lib.cpu_peers_llm import llm_figures
from scripts.lib.cpu_peers_page import write_page
from scripts.lib.cpu_peers_verify import verify_figures
from scripts.lib.figures import parser, report
from scripts.lib.peer_process import PYTHON, PeerError
from scripts.lib.result_page import add_docs_flag
from scripts.speech_data import FOLDER
from sglang_ext.models import ModelError
from sglang_ext.sweep.data_files import WorkloadError

_USAGE_ERROR = 2

PARTS: dict[str, Part] = {
    "asr": asr_figures,
    "llm": llm_figures,
    "formats": format_figures,
    **{f"lossless-{form}": lossless_part(form) for form in FORMS},
    "verify": verify_figures,
    "shared": lambda options: shared_core_figures(
        options.model, quick=options.quick, args=weights_flags(options.llm_weights, "--llm-weights")
    ),
    "memory": memory_figures,
}


def main() -> int:
    options = _options()
    try:
        for option in ("asr_weights", "llm_weights"):
            weights_flags(getattr(options, option), f"--{option.replace('_', '-')}")
        figures = kept_figures(options.json)
        for found in figures_of(options, PARTS):
            figures |= found or {}
            keep(figures, options.json)
    except (UsageError, PeerError, ModelError, WorkloadError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    figures = report(figures, options.json)
    if options.docs:
        forms = {"asr": options.asr_weights, "llm": options.llm_weights}
        write_page(options.docs, figures, forms)
    lines = list(broken(figures))
    for line in lines:
        print(line, file=sys.stderr)
    return int(bool(lines))


def _options() -> argparse.Namespace:
    args = parser(__doc__)
    args.add_argument("--audio", type=Path, default=FOLDER, metavar="DIR", help="[%(default)s]")
    form = "form of our weights (--cpu-weights of the server) [%(default)s]"
    args.add_argument("--asr-weights", default="int8", metavar="FORM", help=form)
    args.add_argument("--llm-weights", default="int4", metavar="FORM", help=form)
    args.add_argument(
        "--peers", type=Path, default=PYTHON, metavar="PYTHON",
        help="interpreter of the peers' environment [%(default)s]",
    )  # fmt: skip
    args.add_argument(
        "--memory-before", type=Path, metavar="DIR", help="checkout of an earlier commit [none]"
    )
    add_docs_flag(args)
    return parts_of(args, PARTS, ",".join(PARTS))


def kept_figures(path: Path | None) -> dict[str, float]:
    """What earlier runs have left in a file of figures; empty where there is none.

    Raises:
        UsageError: it is another file.
    """
    if path is None or not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text())["figures"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"--json {path}: this is no file of figures; name another") from None


def keep(figures: dict[str, float], path: Path | None) -> None:
    """Write what there is so far."""
    if path is not None:
        path.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
