"""The command `sglang-ext captions`: what it is asked for, and its servers."""

import argparse
import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_ext import extras
from sglang_ext.captions.captions_options import CaptionsError, add_options, check
from sglang_ext.servers.processes import end_as_ctrl_c

if TYPE_CHECKING:
    import numpy as np

    from sglang_ext.captions.display import Display
    from sglang_ext.captions.page_servers import PageServers

_FAILED = 1
_USAGE_ERROR = 2


def add_commands(commands: Any) -> None:
    """Add `captions` to the command line's subparsers."""
    command = commands.add_parser(
        "captions",
        help="live captions of audio, and their translation",
        description="Play audio in real time and print its captions as they are recognised, and "
        "their translation. Without --translate-url and --translate-model there are only captions.",
        allow_abbrev=False,
    )
    add_options(command)
    command.set_defaults(func=run)


@end_as_ctrl_c()
def run(args: argparse.Namespace) -> int:
    """Caption all of the audio; returns the exit code (1: some was not captioned)."""
    from sglang_ext.captions.display import DisplayError
    from sglang_ext.servers.started_server import ServerError

    try:
        extras.require("captions", ["speech"])
        language = check(args)
        if args.page:
            _serve_page(args)
        blocks, displays = _open(args.file), _displays(args)
        if args.translate:
            return 0 if _translate(args, blocks, displays, language[0]) else _FAILED
        with _servers(args) as urls:
            complete = asyncio.run(_caption(args, blocks, displays, language, *urls))
        return 0 if complete else _FAILED
    except (CaptionsError, DisplayError, ServerError, extras.MissingExtra) as error:
        print(f"sglang-ext captions: error: {error}", file=sys.stderr)
        return _USAGE_ERROR


def _page_servers(args: argparse.Namespace) -> "PageServers":
    """The servers that are to be started."""
    from sglang_ext.captions.page_servers import PageServers

    return PageServers(
        args.asr_model,
        _asr_flags(args),
        args.translate_model,
        _translate_flags(args),
        _base(args.translate_url) if args.translate_url else None,
        args.api_key if args.translate_url else "",
        args.port,
    )


def _translate(
    args: argparse.Namespace,
    blocks: "Iterator[np.ndarray]",
    displays: "list[Display]",
    language: str,
) -> bool:
    """Caption and translate by a server's WebSocket; returns whether all of it was.

    Raises:
        CaptionsError: the server does not take the session.
        ServerError: one did not start.
    """
    from sglang_ext.captions.live_captions import Captions
    from sglang_ext.captions.page_servers import running
    from sglang_ext.captions.playback import Playback
    from sglang_ext.captions.socket_captions import SocketCaptions, pcm_settings

    session = {
        "audio": {
            "input": pcm_settings(args.silence, language, args.prompt),
            "output": {"language": args.translate},
        },
        "sglang_ext": {
            "step_ms": round(args.step * 1000),
            "mask": args.mask,
            "beta": args.beta,
            "finished_only": args.finished_only,
        },
    }
    with contextlib.ExitStack() as stack:
        url, key = _base(args.asr_url or ""), args.api_key
        if not url:
            servers = stack.enter_context(running(_page_servers(args)))
            for server in servers:
                server.wait()
            url, key = servers[0].url, ""
        playback = Playback(blocks, args.speed)
        captions = Captions(playback, displays, translated=True)
        return asyncio.run(SocketCaptions(captions, playback, session).run(url, key))


def _serve_page(args: argparse.Namespace) -> NoReturn:
    """Serve the captions page.

    Raises:
        ServerError: a server did not start, or has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    from sglang_ext.captions.page_servers import serve

    serve(_page_servers(args))


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
    return bool(args.translate or args.translate_url or args.translate_model)


@contextlib.contextmanager
def _servers(args: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """The addresses of both servers; those that are started here are stopped, too.

    Raises:
        ServerError: one did not start.
    """
    from sglang_ext.servers.started_server import started

    with contextlib.ExitStack() as stack:
        starting = {}
        if not args.asr_url:
            starting["asr"] = stack.enter_context(started(args.asr_model, _asr_flags(args)))
        if args.translate_model:
            server = started(args.translate_model, _translate_flags(args))
            starting["translate"] = stack.enter_context(server)
        urls = {name: server.wait().url for name, server in starting.items()}
        yield (
            urls["asr"] if "asr" in urls else _base(args.asr_url),
            urls.get("translate") or (_base(args.translate_url) if args.translate_url else None),
        )


def _asr_flags(args: argparse.Namespace) -> list[str]:
    """Flags of a Whisper server that is started here."""
    from sglang_ext.cpu.install import wants_cpu_engine

    flags = [*_weights(), *shlex.split(args.asr_flags)]
    if args.draft_model == "none" or not wants_cpu_engine():
        return flags
    return ["--speculative-algorithm", "SSSD", "--draft-model", args.draft_model, *flags]


def _translate_flags(args: argparse.Namespace) -> list[str]:
    """Flags of a text server that is started here."""
    flags = [*_weights(), "--speculative-algorithm", "SSSD", "--drafters", "ssbd"]
    return flags + shlex.split(args.translate_flags)


def _weights() -> list[str]:
    """Flags for live speech on a CPU, where a moment counts more than fp32's last bits."""
    from sglang_ext.cpu.install import wants_cpu_engine

    chosen = "SGLANG_EXT_CPU_WEIGHTS" in os.environ or not wants_cpu_engine()
    return [] if chosen else ["--cpu-weights", "int8"]


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
    from sglang_ext.api.translation.sentence_translations import LiveTranslation
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
