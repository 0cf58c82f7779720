"""What `sglang-ext captions` is asked for, and whether it can be."""

import argparse
import os
from pathlib import Path
from urllib.parse import urlsplit

from sglang_ext.api.languages import NAMES

DEFAULT_ASR_MODEL = "whisper-base"
DEFAULT_DRAFT_MODEL = "whisper-tiny.en"
DEFAULT_PAGE_PORT = 30000


class CaptionsError(Exception):
    """What went wrong, in a line."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add all options of the command."""
    _add_servers(command)
    _add_captions(command)


def _add_servers(command: argparse.ArgumentParser) -> None:
    """The audio, and what recognises and translates it."""
    command.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="audio or video; -: standard input, wav or raw s16le 16 kHz mono",
    )
    command.add_argument(
        "--page",
        action="store_true",
        help="start the servers, print the address of the page /captions, serve it until Ctrl-C",
    )
    command.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PAGE_PORT,
        help="of the page; another one if it is taken [%(default)d]",
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
    command.add_argument(
        "--translate",
        metavar="LANG",
        help="translate into this language, name or ISO 639-1 code, by the WebSocket of a Whisper "
        "server with --translate-with; one that is started here gets --translate-model's",
    )
    command.add_argument(
        "--finished-only",
        action="store_true",
        help="with --translate: translate sentences once they are finished",
    )
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


def check(args: argparse.Namespace) -> tuple[str, str]:
    """The source language's ISO code and name; what can be wrong is found before servers start.

    Raises:
        CaptionsError: an option is wrong.
    """
    if args.page and (args.file or args.asr_url):
        raise CaptionsError("--page starts a Whisper server: leave FILE and --asr-url out")
    if not args.page and not args.file:
        raise CaptionsError("name a FILE, or - for standard input; --page serves a page instead")
    _check_translate(args)
    if not 1 <= args.port <= 65535:
        raise CaptionsError(f"--port {args.port}: expected 1 to 65535")
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


def _check_translate(args: argparse.Namespace) -> None:
    """What --translate needs, and what needs it.

    Raises:
        CaptionsError: it is not there.
    """
    text_server = args.translate_url or args.translate_model
    if not args.translate:
        if args.finished_only:
            raise CaptionsError("--finished-only goes with --translate LANG")
        return
    if args.page:
        raise CaptionsError("--page has a menu of languages: leave --translate out")
    if args.asr_url and text_server:
        raise CaptionsError(
            "with --translate, the server of --asr-url translates with its own text server "
            "(--translate-with): leave --translate-url and --translate-model out"
        )
    if not args.asr_url and not text_server:
        raise CaptionsError(
            "--translate needs a text server: name --translate-model or --translate-url, or with "
            "--asr-url a Whisper server that has one"
        )
    if not args.speed:
        raise CaptionsError("--translate sends audio as it plays: --speed must be above 0")
    if not 0.1 <= args.step <= 5:
        raise CaptionsError(f"--step {args.step:g}: expected 0.1 to 5 seconds with --translate")
