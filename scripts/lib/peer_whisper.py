"""faster-whisper, for scripts.bench_cpu_peers: run by the peers' interpreter, without our code.

    python peer_whisper.py MODEL_DIR --threads N --compute int8

Reads a JSON object a line, {"files": [WAV, ...], "together": bool}, and answers {"texts": [...],
"seconds": s, "cpu_s": s}: greedy, beam 1, English, no VAD, no timestamps; `together` as one batch.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

RATE = 16_000


def main() -> None:
    # What libraries print belongs to people: answers have the real standard output to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--compute", default="int8")
    options = parser.parse_args()
    import ctranslate2  # type: ignore[import-not-found]
    import faster_whisper  # type: ignore[import-not-found]

    model = faster_whisper.WhisperModel(
        options.model, device="cpu", compute_type=options.compute, cpu_threads=options.threads
    )
    versions = {
        "faster-whisper": faster_whisper.__version__,
        "ctranslate2": ctranslate2.__version__,
    }
    print(json.dumps({"versions": versions}), file=answers)
    batched = faster_whisper.BatchedInferencePipeline(model)
    for line in sys.stdin:
        asked = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        if asked["together"]:
            texts = transcribe_together(batched, asked["files"], faster_whisper.decode_audio)
        else:
            texts = [transcribe(model, file) for file in asked["files"]]
        seconds, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"texts": texts, "seconds": seconds, "cpu_s": cpu_s}), file=answers)


def transcribe(model: Any, file: str) -> str:
    """One clip of at most 30 s."""
    segments, _ = model.transcribe(
        file, language="en", beam_size=1, best_of=1, temperature=0.0, vad_filter=False,
        without_timestamps=True, condition_on_previous_text=False,
    )  # fmt: skip
    return "".join(segment.text for segment in segments)


def transcribe_together(batched: Any, files: list[str], decode_audio: Any) -> list[str]:
    """Clips of at most 30 s as one batch: one recording, cut where each begins and ends."""
    import numpy as np

    clips = [decode_audio(file, sampling_rate=RATE) for file in files]
    ends = np.cumsum([len(clip) for clip in clips]) / RATE
    starts = [0.0, *ends[:-1].tolist()]
    cuts = [{"start": s, "end": e} for s, e in zip(starts, ends.tolist(), strict=True)]
    segments, _ = batched.transcribe(
        np.concatenate(clips), language="en", beam_size=1, best_of=1, temperature=0.0,
        vad_filter=False, without_timestamps=True, clip_timestamps=cuts, batch_size=len(files),
    )  # fmt: skip
    texts = [""] * len(files)
    for segment in segments:
        middle = (segment.start + segment.end) / 2
        texts[int(np.searchsorted(ends, middle, side="right").clip(0, len(files) - 1))] += (
            segment.text
        )
    return texts


if __name__ == "__main__":
    main()
