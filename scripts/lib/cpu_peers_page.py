"""What bench_cpu_peers has shown, as a page of docs/measured and as rows of docs/performance.md."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.lib.cpu_peers_asr import PEER as FASTER_WHISPER
from scripts.lib.cpu_peers_asr import PLAIN as ASR_PLAIN
from scripts.lib.cpu_peers_asr import SPECASR
from scripts.lib.cpu_peers_asr import label as asr_label
from scripts.lib.cpu_peers_llm import COLD, LOOKUP, PLAIN, WARM, label
from scripts.lib.cpu_peers_llm import PEER as LLAMA
from scripts.lib.result_page import ResultPage
from sglang_ext.sweep.peer_section import NAME, put_section
from sglang_ext.sweep.result_tables import UNKNOWN, Table

Figures = Mapping[str, float]
_READING = """\
Engines are up together and take turns, on all cores, with the same published weights. Ours are
servers asked over HTTP and all of their processes count; the peers are libraries in one process.
Beside weights in 8 or 4 bits a text model's K and V have 16 bits in both (ours are bfloat16,
llama.cpp's float16).

- **Output tokens/s**: prompts' time included; the ratio is to llama.cpp's plain decoding.
- **CPU s, wall s per 10 s of audio**: each clip by itself, and eight at once."""
_LLM_ROWS = {
    LLAMA: "llama.cpp", LOOKUP: "llama.cpp, prompt lookup", PLAIN: "plain SGLang, this CPU engine",
    COLD: "SSSD cold", WARM: "SSSD warm",
}  # fmt: skip
_ASR_ROWS = {
    FASTER_WHISPER: FASTER_WHISPER, ASR_PLAIN: "plain SGLang, this CPU engine",
    SPECASR: "SpecASR",
}  # fmt: skip


def write_page(docs: Path, figures: Figures, forms: Mapping[str, str]) -> None:
    """Write DOCS/measured/cpu-peers.md, and its tables into DOCS/performance.md.

    Args:
        forms: of our weights by part, for the titles.
    """
    page = ResultPage(
        NAME, "Beside llama.cpp and faster-whisper", list(findings(figures)), _READING,
        list(tables(figures, forms)),
    )  # fmt: skip
    page.write(docs)
    put_section(docs)


def findings(figures: Figures) -> Iterator[str]:
    """What is to be said of the run, a sentence each."""
    if "foreign_cpu_percent" in figures:
        yield (
            f"Other programs took {figures['foreign_cpu_percent']:.0f}% of the processors "
            f"meanwhile, the host {figures['steal_percent']:.0f}%."
        )
    if "verify_overhead" in figures:
        yield (
            f"A verify step of {figures['verify_width']:.0f} nodes takes "
            f"{figures['verify_overhead']:.2f} of its linear layers and attention."
        )
    left = [(name, value) for name, value in figures.items() if name.startswith("shared_core_")]
    for name, value in left:
        yield f"Beside {name.split('_')[3]} busy processes {value:.2f} of the speed is left."


def tables(figures: Figures, forms: Mapping[str, str]) -> Iterator[Table]:
    """The rows of the parts that ran."""
    if "llm_mismatches" in figures:
        yield Table(
            f"SmolLM2-135M, MT-Bench and GSM8K: output tokens/s (ours: {forms['llm']})",
            ("engine", "batch 1", "batch 8"),
            [
                (text, *(_llm_cell(figures, name, end) for end in ("", "_batch8")))
                for name, text in _LLM_ROWS.items()
            ],
        )
    if "asr_clips" in figures:
        columns = ("cpu_s", "wall_s", "cpu_s_eight_at_once", "wall_s_eight_at_once")
        yield Table(
            f"whisper-base, per 10 s of audio (ours: {forms['asr']})",
            ("engine", "CPU s", "wall s", "CPU s, eight at once", "wall s, eight at once", "WER"),
            [
                (
                    text,
                    *(_per_10s(figures, column, asr_label(name)) for column in columns),
                    f"{figures[f'asr_wer_{asr_label(name)}']:.1%}",
                )
                for name, text in _ASR_ROWS.items()
            ],
        )


def _llm_cell(figures: Figures, name: str, end: str) -> str:
    key = f"{label(name)}_tokens_per_s{end}"
    if key not in figures:
        return UNKNOWN
    base = figures[f"{label(LLAMA)}_tokens_per_s{end}"]
    return f"{figures[key]:.1f} ({figures[key] / base:.2f}x)"


def _per_10s(figures: Figures, column: str, name: str) -> str:
    what, _, more = column.partition("_s")
    value = figures.get(f"asr_{what}_s_per_audio_s{more}_{name}")
    return UNKNOWN if value is None else f"{10 * value:.2f}"
