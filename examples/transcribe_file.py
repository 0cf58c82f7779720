"""Transcribe a file of audio through OpenAI's client, with the times of its segments.

sglang-ext serve --model whisper-base
python examples/transcribe_file.py talk.mp3 --language en
"""

import argparse
from pathlib import Path

import openai

SAMPLE = Path(__file__).parents[1] / "sglang_ext" / "sweep" / "data" / "LJ001-0001.flac"


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("file", nargs="?", type=Path, default=SAMPLE, help="wav, mp3, webm, ...")
    args.add_argument("--base-url", default="http://127.0.0.1:30000", help="[%(default)s]")
    args.add_argument("--language", default=openai.omit, help="a code or name; default: detected")
    options = args.parse_args()

    client = openai.OpenAI(base_url=options.base_url + "/v1", api_key="none")
    made = client.audio.transcriptions.create(
        file=options.file,
        model=client.models.list().data[0].id,
        language=options.language,
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    for segment in made.segments or []:
        print(f"{segment.start:6.1f} to {segment.end:6.1f} s {segment.text.strip()}")
    print(f"{made.language}, {made.duration:.1f} s of audio")


if __name__ == "__main__":
    main()
