"""`sglang-ext transcribe FILE...`: transcripts from a shell, by a server or one started for it."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_ext import extras

DEFAULT_MODEL = "whisper-base"
# speech.formats has them too, but takes seconds to import.
_SUFFIXES = {"text": "txt", "json": "json", "verbose_json": "json", "srt": "srt", "vtt": "vtt"}
_CONNECT_TIMEOUT_S = 10.0
_FAILED = 1
_USAGE_ERROR = 2


class TranscribeError(Exception):
    """What went wrong, in a line."""


def add_commands(commands: Any) -> None:
    """Add `transcribe` to the command line's subparsers."""
    command = commands.add_parser(
        "transcribe",
        help="transcribe audio files, by a server or one started for them",
        description="Transcribe audio files with Whisper. Flags that are not listed here go to "
        "the server that is started (`sglang-ext serve --help`).",
        allow_abbrev=False,
    )
    command.add_argument("files", nargs="+", type=Path, metavar="FILE", help="audio or video")
    where = command.add_mutually_exclusive_group()
    where.add_argument("--server", metavar="URL", help="a running server, http://HOST:PORT")
    where.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="path, hub id or name of the Whisper to start a server with [%(default)s]",
    )
    command.add_argument(
        "--format", choices=sorted(_SUFFIXES), default="text", help="of the output [%(default)s]"
    )
    command.add_argument("--language", default="", help="code or name; default: detected")
    command.add_argument("--translate", action="store_true", help="into English")
    command.add_argument("--prompt", default="", help="names and words that may come up")
    command.add_argument("--temperature", type=float, default=0.0, help="0 to 1 [%(default)g]")
    command.add_argument(
        "--words", action="store_true", help="word timestamps too; needs --format verbose_json"
    )
    command.add_argument(
        "--output", type=Path, metavar="DIR", help="a file for each input; default: standard output"
    )
    command.add_argument("--jobs", type=int, default=4, help="files at once [%(default)d]")
    command.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="[$OPENAI_API_KEY]"
    )
    command.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Transcribe all files; returns the exit code (1: some could not be transcribed)."""
    try:
        extras.require("transcribe", ["speech"])
        outputs = _check(args)
        with _server(args) as (url, model):
            return _transcribe_all(args, outputs, url, model)
    except (TranscribeError, extras.MissingExtra) as error:
        print(f"sglang-ext transcribe: error: {error}", file=sys.stderr)
        return _USAGE_ERROR


def _check(args: argparse.Namespace) -> list[Path | None]:
    """Where each file's transcript goes; what can be wrong is found before a server starts.

    Raises:
        TranscribeError: a file is not there, or two would write the same output.
    """
    for path in args.files:
        if not path.is_file():
            raise TranscribeError(f"{path}: no such file")
    if args.words and args.format != "verbose_json":
        raise TranscribeError("--words needs --format verbose_json")
    if args.jobs < 1:
        raise TranscribeError(f"--jobs {args.jobs}: expected 1 or more")
    if args.rest and args.server:
        raise TranscribeError(f"unrecognized arguments: {' '.join(args.rest)}")
    if args.output is None:
        return [None] * len(args.files)
    outputs = [args.output / f"{path.name}.{_SUFFIXES[args.format]}" for path in args.files]
    if len(set(outputs)) < len(outputs):
        raise TranscribeError("--output: two of the files have the same name")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TranscribeError(f"--output {args.output}: {error.strerror}") from None
    return list(outputs)


def _transcribe_all(
    args: argparse.Namespace, outputs: Sequence[Path | None], url: str, model: str
) -> int:
    import httpx
    from tqdm import tqdm

    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    lengths = [_seconds(path) for path in args.files]
    failed = 0
    with (
        httpx.Client(base_url=url, headers=headers, timeout=timeout) as client,
        tqdm(
            total=round(sum(lengths), 1), unit="s", desc="audio", file=sys.stderr,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {n:.0f}/{total:.0f} s "
            "[{elapsed}, {remaining} left]",
        ) as bar,
        ThreadPoolExecutor(args.jobs) as pool,
    ):  # fmt: skip
        jobs = [
            pool.submit(_transcribe, args, client, model, path, seconds, bar)
            for path, seconds in zip(args.files, lengths, strict=True)
        ]
        for path, output, job in zip(args.files, outputs, jobs, strict=True):
            try:
                _write(job.result(), output, bar)
            except (TranscribeError, OSError, httpx.HTTPError) as error:
                failed += 1
                bar.write(f"{path}: {error or type(error).__name__}", file=sys.stderr)
    return _FAILED if failed else 0


def _seconds(path: Path) -> float:
    """The audio's length as its header says; 0 where it does not."""
    from speech.audio import AudioError, AudioReader

    try:
        with AudioReader(path) as reader:
            return reader.duration or 0.0
    except AudioError:
        return 0.0  # the server will say what is wrong


def _transcribe(
    args: argparse.Namespace, client: Any, model: str, path: Path, seconds: float, bar: Any
) -> str:
    """A file's transcript in the chosen format."""
    task = "translations" if args.translate else "transcriptions"
    fields = {
        "model": model,
        "language": args.language,
        "prompt": args.prompt,
        "temperature": str(args.temperature),
        "response_format": args.format,
        "stream": "true",
        "progress": "true",
    }
    granularities = ["segment", "word"] if args.words else []
    with path.open("rb") as file:
        request = client.stream(
            "POST",
            f"/v1/audio/{task}",
            data={**fields, "timestamp_granularities[]": granularities},
            files={"file": (path.name, file)},
        )
        with request as response:
            if response.status_code != 200:
                response.read()
                raise TranscribeError(_message(response))
            result = _follow(response.iter_lines(), seconds, bar)
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, indent=2) + "\n"


def _follow(lines: Iterator[str], seconds: float, bar: Any) -> Any:
    """Read the events, moving the bar; returns the result."""
    shown = 0.0
    for line in lines:
        if not line.startswith("data:"):
            continue
        event = json.loads(line.removeprefix("data:"))
        if "error" in event:
            raise TranscribeError(event["error"]["message"])
        if event["type"] == "transcript.progress":
            done = min(event["seconds"], seconds)
            bar.update(max(0.0, done - shown))
            shown = max(shown, done)
        elif event["type"] == "transcript.text.done":
            bar.update(max(0.0, seconds - shown))
            if "result" not in event:
                raise TranscribeError("the server is not one of sglang-ext's")
            return event["result"]
    raise TranscribeError("the server hung up before the transcript was complete")


def _message(response: Any) -> str:
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:200]}"


def _write(text: str, output: Path | None, bar: Any) -> None:
    if output is None:
        with bar.external_write_mode(file=sys.stdout):
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    from sglang_ext.models.cached_tables import replace_file

    with replace_file(output) as file:
        file.write(text.encode())


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The address of a server and its model's name; one that is started here is stopped too."""
    if args.server:
        parts = urlsplit(args.server)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise TranscribeError(f"--server {args.server}: expected http://HOST:PORT")
        url = args.server.rstrip("/").removesuffix("/v1")
        yield url, _served_model(url, args.api_key)
        return
    from sglang_ext.servers.started_server import ServerError, started

    try:
        with started(args.model, args.rest) as server:
            yield server.wait().url, _served_model(server.url, "")
    except ServerError as error:
        raise TranscribeError(str(error)) from None


def _served_model(url: str, api_key: str) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(url + "/v1/models", headers=headers, timeout=_CONNECT_TIMEOUT_S)
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise TranscribeError(f"{url} does not answer as a server should: {error}") from None
