"""The command `sglang-ext captions`: what it is asked for, and its servers."""

import argparse
import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_ext import extras
from sglang_ext.api.languages import NAMES
from sglang_ext.servers.processes import end_as_ctrl_c

if TYPE_CHECKING:
    import numpy as np

    from sglang_ext.captions.display import Display

DEFAULT_ASR_MODEL = "whisper-base"
DEFAULT_DRAFT_MODEL = "whisper-tiny.en"
_FAILED = 1
_USAGE_ERROR = 2


class CaptionsError(Exception):
    """What went wrong, in a line."""


def add_commands(commands: Any) -> None:
    """Add `captions` to the command line's subparsers."""
    command = commands.add_parser(
        "captions",
        help="live captions of audio, and their translation",
        description="Play audio in real time and print its captions as they are recognised, and "
        "their translation. Without --translate-url and --translate-model there are only captions.",
        allow_abbrev=False,
    )
    _add_servers(command)
    _add_captions(command)
    command.set_defaults(func=run)


def _add_servers(command: argparse.ArgumentParser) -> None:
    """The audio, and what recognises and translates it."""
    command.add_argument(
        "file",
        metavar="FILE",
        help="audio or video; -: standard input, wav or raw s16le 16 kHz mono",
    )
    asr = command.add_mutually_exclusive_group()
    asr.add_argument("--asr-url", metavar="URL", help="a running Whisper server, http://HOST:PORT")
    asr.add_argument(
        "--asr-model",
        default=DEFAULT_ASR_MODEL,
        help="path, hub id or name of the Whisper to start a server with [%(default)s]",
    )
    command.add_argument(
        "--draft-model",
        default=DEFAULT_DRAFT_MODEL,
        help="smaller Whisper that drafts for --asr-model on a CPU; none: none [%(default)s]",
    )
    command.add_argument("--asr-flags", default="", help="further flags of the server that starts")
    translate = command.add_mutually_exclusive_group()
    translate.add_argument("--translate-url", metavar="URL", help="a running server with SSBD")
    translate.add_argument(
        "--translate-model", help="path, hub id or name of the model to start a server with"
    )
    command.add_argument("--translate-flags", default="", help="the same for the second server")


def _add_captions(command: argparse.ArgumentParser) -> None:
    """Options of the captions, and the key."""
    command.add_argument(
        "--source-language", default="English", help="name or ISO 639-1 code [%(default)s]"
    )
    command.add_argument("--target-language", default="French", help="the same [%(default)s]")
    command.add_argument("--prompt", default="", help="names and words that may come up")
    command.add_argument(
        "--step", type=float, default=1.0, help="seconds between hypotheses [%(default)g]"
    )
    command.add_argument(
        "--silence", type=float, default=1.5,
        help="seconds of silence that end what was said [%(default)g]",
    )  # fmt: skip
    command.add_argument(
        "--mask", type=int, default=0, help="tokens of a translation held as unstable [%(default)d]"
    )
    command.add_argument(
        "--beta", type=float, help="bias towards the last translation, 0 to 1 [the server's]"
    )
    command.add_argument(
        "--speed", type=float, default=1.0,
        help="1 is real time; 0: as fast as recognition goes [%(default)g]",
    )  # fmt: skip
    command.add_argument("--json-lines", type=Path, metavar="FILE", help="log every update")
    command.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="[$OPENAI_API_KEY]"
    )


@end_as_ctrl_c()
def run(args: argparse.Namespace) -> int:
    """Caption all of the audio; returns the exit code (1: some was not captioned)."""
    from sglang_ext.captions.display import DisplayError
    from sglang_ext.servers.started_server import ServerError

    try:
        extras.require("captions", ["speech"])
        language = _check(args)
        blocks, displays = _open(args.file), _displays(args)
        with _servers(args) as urls:
            complete = asyncio.run(_caption(args, blocks, displays, language, *urls))
        return 0 if complete else _FAILED
    except (CaptionsError, DisplayError, ServerError, extras.MissingExtra) as error:
        print(f"sglang-ext captions: error: {error}", file=sys.stderr)
        return _USAGE_ERROR


def _check(args: argparse.Namespace) -> tuple[str, str]:
    """The source language's ISO code and name; what can be wrong is found before servers start.

    Raises:
        CaptionsError: an option is wrong.
    """
    for name in ("asr_url", "translate_url"):
        url = getattr(args, name)
        parts = urlsplit(url or "http://default")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise CaptionsError(f"--{name.replace('_', '-')} {url}: expected http://HOST:PORT")
    if not args.step >= 0.1:
        raise CaptionsError(f"--step {args.step:g}: expected 0.1 seconds or more")
    if not 0.1 <= args.silence <= 10:
        raise CaptionsError(f"--silence {args.silence:g}: expected 0.1 to 10 seconds")
    if not 0 <= args.speed < float("inf"):
        raise CaptionsError(f"--speed {args.speed:g}: expected 0 or more")
    if args.mask < 0:
        raise CaptionsError(f"--mask {args.mask}: expected 0 or more")
    if args.beta is not None and not 0 <= args.beta <= 1:
        raise CaptionsError(f"--beta {args.beta:g}: expected a number from 0 to 1")
    codes = {name.casefold(): code for code, name in NAMES.items()}
    given = args.source_language.strip().casefold()
    code = given if given in NAMES else codes.get(given)
    if code is None:
        raise CaptionsError(
            f"--source-language {args.source_language}: expected a language's English name or "
            "ISO 639-1 code"
        )
    return code, NAMES[code]


def _open(file: str) -> "Iterator[np.ndarray]":
    """The audio's samples.

    Raises:
        CaptionsError: it cannot be read.
    """
    from sglang_ext.captions.playback import file_blocks, stream_blocks
    from speech.audio import AudioError

    if file == "-":
        if sys.stdin.isatty():
            raise CaptionsError("standard input is a terminal; pipe audio into it, or name a file")
        return stream_blocks(sys.stdin.fileno())
    if not Path(file).is_file():
        raise CaptionsError(f"{file}: no such file")
    try:
        return file_blocks(Path(file))
    except AudioError as error:
        raise CaptionsError(f"{file}: {error}") from None


def _displays(args: argparse.Namespace) -> "list[Display]":
    """Where captions go.

    Raises:
        DisplayError: the log cannot be written.
    """
    from sglang_ext.captions.display import JsonLines, Lines, Terminal

    displays: list[Display] = []
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        displays.append(Terminal(sys.stdout, _translates(args)))
    else:
        displays.append(Lines(sys.stdout))
    if args.json_lines:
        displays.append(JsonLines(args.json_lines))
    return displays


def _translates(args: argparse.Namespace) -> bool:
    return bool(args.translate_url or args.translate_model)


@contextlib.contextmanager
def _servers(args: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """The addresses of both servers; those that are started here are stopped, too.

    Raises:
        ServerError: one did not start.
    """
    from sglang_ext.cpu.install import wants_cpu_engine
    from sglang_ext.servers.started_server import started

    with contextlib.ExitStack() as stack:
        starting = {}
        if not args.asr_url:
            flags = shlex.split(args.asr_flags)
            if args.draft_model != "none" and wants_cpu_engine():
                flags = [
                    "--speculative-algorithm",
                    "SSSD",
                    "--draft-model",
                    args.draft_model,
                    *flags,
                ]
            starting["asr"] = stack.enter_context(started(args.asr_model, flags))
        if args.translate_model:
            flags = ["--speculative-algorithm", "SSSD", "--drafters", "ssbd"]
            flags += shlex.split(args.translate_flags)
            starting["translate"] = stack.enter_context(started(args.translate_model, flags))
        urls = {name: server.wait().url for name, server in starting.items()}
        yield (
            urls["asr"] if "asr" in urls else _base(args.asr_url),
            urls.get("translate") or (_base(args.translate_url) if args.translate_url else None),
        )


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


async def _caption(
    args: argparse.Namespace,
    blocks: "Iterator[np.ndarray]",
    displays: "list[Display]",
    language: tuple[str, str],
    asr_url: str,
    translate_url: str | None,
) -> bool:
    """Returns whether all of it was captioned, and translated.

    Raises:
        CaptionsError: a server does not take the settings.
    """
    from sglang_ext.api.calls import RequestError, client
    from sglang_ext.api.translation.live_translation import LiveTranslation
    from sglang_ext.captions.live_captions import Captions, follow
    from sglang_ext.captions.playback import Playback
    from sglang_ext.captions.recognition import Recognition, served_model
    from speech.streaming import StreamingRecognizer, StreamOptions

    code, name = language
    playback = Playback(blocks, args.speed)
    captions = Captions(playback, displays, translate_url is not None)
    async with contextlib.AsyncExitStack() as stack:
        asr = await stack.enter_async_context(client(asr_url, args.api_key if args.asr_url else ""))
        translation = None
        try:
            model = await served_model(asr)
            if translate_url is not None:
                key = args.api_key if args.translate_url else ""
                settings = {
                    "source_language": name,
                    "target_language": args.target_language,
                    "mask": args.mask,
                    "beta": args.beta,
                }
                translation = LiveTranslation(
                    await stack.enter_async_context(client(translate_url, key)),
                    lambda _: settings,
                    captions.translation,
                    captions.error,
                )
                await translation.check()
        except RequestError as error:
            raise CaptionsError(str(error)) from None
        recognition = Recognition(asr, model, code, args.prompt, captions.error)
        options = StreamOptions(step_s=args.step, silence_s=args.silence)
        recognizer = StreamingRecognizer(recognition.transcribe, options)
        return await follow(captions, playback, recognizer, translation, wait=args.speed == 0)
