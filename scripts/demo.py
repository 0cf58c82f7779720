"""See it work: real prompts through SGLang with and without SSSD, and one audio file.

make demo        (or: python -m scripts.demo)
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.lib.client import TIMEOUT_S, generate_all, stream
from scripts.lib.http_client import HTTP
from scripts.lib.server import Server
from scripts.lib.spec_bench import MODEL, Prompt, spec_bench
from sglang_ext.sweep.data_files import CARRIED

WHISPER = "whisper-base"
AUDIO = CARRIED / "LJ001-0001.flac"
PROMPTS = 8
TOKENS = 96
# Questions of the same kinds, answered beforehand: what a server in use has served.
SERVED_BEFORE = 48

NEXT = """
What to try next
  serve     {bin}sglang-ext serve --model smollm2-135m-instruct --speculative-algorithm SSSD
  ask       curl http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \\
              -d '{{"model": "smollm2-135m-instruct",
                   "messages": [{{"role": "user", "content": "Hi"}}]}}'
  measure   {bin}python -m scripts.bench_decode --quick
  check     {bin}python -m scripts.check_lossless --quick
  read      README.md, docs/drafters.md (add a drafter of your own)
"""


class Row:
    """One server's answers to all prompts."""

    def __init__(
        self, name: str, url: str, prompts: Sequence[Prompt], params: dict[str, Any] | None = None
    ):
        self.name = name
        answers = []
        for i, prompt in enumerate(prompts):
            progress(f"{name}: prompt {i + 1} of {len(prompts)}")
            answers.append(stream(url, prompt.input_ids, params=params, max_new_tokens=TOKENS))
        progress("")
        self.outputs = [answer.token_ids for answer in answers]
        tokens = sum(len(ids) - 1 for ids in self.outputs)
        self.speed = tokens / sum(answer.decode_seconds for answer in answers)
        self.accept_length = sum(a.accept_length for a in answers) / len(answers)

    def print(self, base: "Row") -> None:
        """A line of the table, against `base`."""
        same = sum(a == b for a, b in zip(self.outputs, base.outputs, strict=True))
        print(
            f"  {self.name:36} {self.speed:>8.1f} {self.speed / base.speed:>7.2f} "
            f"{self.accept_length:>14.2f}   {same}/{len(base.outputs)}",
            flush=True,
        )


def main() -> int:
    started = time.monotonic()
    prompts = spec_bench(MODEL, max_prompt_tokens=200)
    asked, others = prompts[:PROMPTS], prompts[PROMPTS : PROMPTS + SERVED_BEFORE]
    print(f"{PROMPTS} prompts of Spec-Bench, {MODEL}, greedy, one at a time\n")
    step("starting SGLang without speculation, and with SSSD")
    with (
        Server(MODEL, name="plain") as plain,
        Server(MODEL, ["--speculative-algorithm", "SSSD"], name="sssd") as sssd,
    ):
        print(f"  {'server':36} {'tokens/s':>8} {'ratio':>7} {'accept length':>14}   same tokens")
        base = Row("SGLang", plain.base_url, asked)
        base.print(base)
        # Not ingested, so that the next row has only other questions' answers to draw on.
        rows = [Row("SSSD, cold (empty datastore)", sssd.base_url, asked, {"ingest": False})]
        rows[0].print(base)
        generate_all(
            sssd.base_url, [p.input_ids for p in others], in_flight=8, max_new_tokens=TOKENS,
            label="  serving other questions",
        )  # fmt: skip
        for name in ("SSSD, warm (served other questions)", "SSSD, the same questions again"):
            rows.append(Row(name, sssd.base_url, asked))
            rows[-1].print(base)
    step(f"\nstarting Whisper ({WHISPER}) on the same SGLang")
    with Server(WHISPER, name="whisper") as whisper:
        print(f"  {AUDIO.name}: {transcribe(whisper.base_url, AUDIO)}")
    print(f"\nDone in {time.monotonic() - started:.0f} s.")
    print(NEXT.format(bin=f"{Path(sys.executable).parent}/"))
    different = [row.name for row in rows if row.outputs != base.outputs]
    if different:
        print(f"Token ids differ from plain SGLang's: {', '.join(different)}", file=sys.stderr)
    return int(bool(different))


def transcribe(url: str, audio: Path) -> str:
    """The transcript of an audio file, through OpenAI's endpoint."""
    with audio.open("rb") as file:
        response = HTTP.post(
            url + "/v1/audio/transcriptions",
            files={"file": (audio.name, file)},
            data={"model": WHISPER, "language": "en"},
            timeout=TIMEOUT_S,
        )
    response.raise_for_status()
    return response.json()["text"].strip()


def step(text: str) -> None:
    """Say what happens next."""
    print(text, flush=True)


def progress(text: str) -> None:
    """A line that the next one overwrites, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K  {text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
