"""Long files over HTTP: eight at once, every format, 8 to 48 kHz; the words right, memory flat.

Each file is the referenced clips with pauses between them, again and again for ten minutes. All
are posted to /v1/audio/transcriptions together, in rounds; the transcripts are held against the
references (word errors after Whisper's English normalizer), and the server's memory behind every
round against that behind the first, which fills caches.

    python -m scripts.check_long_audio [--model M] [--draft D] [--minutes 10] [--rounds 2] [--quick]
"""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from scripts.lib.client import TIMEOUT_S
from scripts.lib.figures import parser, report
from scripts.lib.http_client import HTTP
from scripts.lib.server import Server
from scripts.lib.word_errors import WordErrors
from scripts.speech_data import FOLDER, Clip, encode, read_clips

# (format, samples per second, channels); Opus itself goes up to 48 kHz.
FILES = (
    ("wav", 8_000, 1), ("flac", 11_025, 1), ("mp3", 16_000, 1), ("ogg", 24_000, 1),
    ("m4a", 32_000, 2), ("webm", 48_000, 2), ("wav", 44_100, 2), ("flac", 48_000, 2),
)  # fmt: skip
PAUSE_S = 0.7
MB = 1e6


def main() -> int:
    args = parser(__doc__, model=False)
    args.add_argument("--model", default="whisper-base", metavar="M", help="[%(default)s]")
    args.add_argument("--draft", default="whisper-tiny.en", metavar="D", help="[%(default)s]")
    args.add_argument("--audio", type=Path, default=FOLDER, metavar="DIR", help="[%(default)s]")
    args.add_argument("--minutes", type=float, default=10.0, help="of each file [%(default)g]")
    args.add_argument("--rounds", type=int, default=2, help="of all files [%(default)s]")
    options = args.parse_args()
    if options.quick:
        options.minutes = 1.0
    clips = [clip for clip in read_clips(options.audio) if clip.reference]
    flags = ["--speculative-algorithm", "SSSD", "--draft-model", options.draft]
    with Server(options.model, flags, name="long-audio") as server:
        expected, errors, memory = check(server, clips, options.minutes * 60, options.rounds)
    for (form, rate, channels), wer in zip(FILES, errors, strict=True):
        print(f"{form:5} {rate:>6} Hz {channels} channel(s): WER {wer:.1%}")
    growth = max(memory[1:], default=memory[0]) / memory[0] - 1
    figures = {
        "files": len(FILES),
        "minutes_each": options.minutes,
        "words_each": len(expected.split()),
        "wer_worst": max(errors),
        "memory_mb_first_round": memory[0] / MB,
        "memory_growth_after": growth,
    }
    report(figures, options.json)
    return 0


def check(
    server: Server, clips: Sequence[Clip], seconds: float, rounds: int
) -> tuple[str, list[float], list[float]]:
    """What is said in each file, the word error rate of each in the last round, and the server's
    memory in bytes behind each round."""
    texts: list[str] = []
    memory: list[float] = []
    expected, files = "", list[bytes]()
    models = HTTP.get(server.base_url + "/v1/models", timeout=TIMEOUT_S).json()
    model = models["data"][0]["id"]
    for form, rate, channels in FILES:
        clip = joined(clips, seconds, rate, channels)
        expected = clip.reference or ""
        files.append(encode(clip, form))
    for number in range(rounds):
        start = time.perf_counter()
        with ThreadPoolExecutor(len(files)) as pool:
            texts = list(pool.map(lambda data: transcribe(server.base_url, model, data), files))
        memory.append(server.memory_bytes())
        print(
            f"round {number + 1}: {len(files)} files in {time.perf_counter() - start:.0f} s, "
            f"the server's processes hold {memory[-1] / MB:.0f} MB",
            flush=True,
        )
    return expected, [WordErrors([expected]).rate([text]) for text in texts], memory


def joined(clips: Sequence[Clip], seconds: float, rate: int, channels: int) -> Clip:
    """The clips one after the other until `seconds` are full, whole clips only."""
    pause = np.zeros(int(PAUSE_S * rate), np.float32)
    own = [(clip.mono(rate), clip.reference or "") for clip in clips]
    parts, said, length = [pause], list[str](), len(pause)
    while True:
        for samples, text in own:
            length += len(samples) + len(pause)
            if length > seconds * rate and said:
                whole = np.concatenate(parts)
                return Clip("long", np.stack([whole] * channels), rate, " ".join(said))
            parts += [samples, pause]
            said.append(text)


def transcribe(base_url: str, model: str, data: bytes) -> str:
    """The text of a posted file.

    Raises:
        httpx.HTTPError: the server refused it.
    """
    response = HTTP.post(
        base_url + "/v1/audio/transcriptions",
        files={"file": ("audio", data)},
        data={"model": model, "language": "en"},
        timeout=6 * TIMEOUT_S,
    )
    response.raise_for_status()
    return response.json()["text"]


if __name__ == "__main__":
    sys.exit(main())
