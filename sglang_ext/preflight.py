"""What can be checked before a model is loaded, so that a mistake costs a second, not a minute."""

import errno
import json
import socket
from collections.abc import Sequence
from pathlib import Path

from sglang_ext import extras
from sglang_ext.block_drafter.drafter_manifest import (
    BlockDrafterError,
    check_target,
    read_manifest,
    target_name,
)
from sglang_ext.drafters import load_class
from sglang_ext.models import ModelError, is_whisper
from sglang_ext.options import Options
from sglang_ext.plugin import ALGORITHM
from sglang_ext.servers.flags import flag_value

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000


class PreflightError(ValueError):
    """The server cannot start like this; the message says what to change."""


def check_launch(argv: Sequence[str], options: Options) -> None:
    """Check the port, the drafters and the datastore.

    Raises:
        PreflightError, DrafterError: one of them cannot be used.
        MissingExtra: the model is a Whisper, and what it needs is not installed.
    """
    host = flag_value(argv, "--host") or DEFAULT_HOST
    port_text = flag_value(argv, "--port") or str(DEFAULT_PORT)
    if not port_text.isdigit() or not 1 <= int(port_text) <= 65535:
        raise PreflightError(f"--port {port_text}: expected a whole number from 1 to 65535")
    check_port(host, int(port_text))
    model = flag_value(argv, "--model-path", "--model") or ""
    if not extras.is_installed("speech") and is_whisper(model):
        extras.require("a Whisper server", ["speech"])
    for name in options.loaded_drafters():
        load_class(name)
    if options.datastore:
        _check_datastore(argv, options)
    if (flag_value(argv, "--speculative-algorithm") or "").upper() == ALGORITHM:
        _check_draft_model(flag_value(argv, "--model-path", "--model") or "", options)
    elif options.live_policy == "alignatt":
        raise PreflightError(
            f"--live-policy alignatt needs --speculative-algorithm {ALGORITHM}, whose steps tell "
            "what tokens attend to; add it, or leave the policy out"
        )


def _check_draft_model(model: str, options: Options) -> None:
    if "specdec" in options.loaded_drafters():
        _check_block_drafter(model, options)
    if "mirror" in options.loaded_drafters():
        # It loads torch, which commands that only check a port do without.
        from sglang_ext.mirror.executor_settings import settings_of

        try:
            settings_of(options)
        except (ModelError, ValueError) as error:
            raise PreflightError(f"--drafter mirror: {error}") from None
    if "specasr" not in options.loaded_drafters():
        return
    if not options.draft_model:
        raise PreflightError("--drafter specasr needs --draft-model, a smaller Whisper")
    for name, path in (("--model", model), ("--draft-model", options.draft_model)):
        config = Path(path) / "config.json"
        kind = json.loads(config.read_text()).get("model_type") if config.is_file() else None
        if kind != "whisper":
            raise PreflightError(f"{name} {path}: SpecASR needs a Whisper, this is {kind or path}")


def _check_block_drafter(model: str, options: Options) -> None:
    """As far as its manifest tells; weights and tokenizer are checked when the drafter loads."""
    if not options.draft_model:
        raise PreflightError(
            "--drafter specdec needs --draft-model, a directory of `sglang-ext drafter train`"
        )
    if is_whisper(model):
        raise PreflightError("--drafter specdec drafts for models that read text, not for Whisper")
    try:
        check_target(
            options.draft_model, read_manifest(options.draft_model), target_name(model), ""
        )
    except BlockDrafterError as error:
        raise PreflightError(f"--draft-model: {error}") from None


def check_port(host: str, port: int) -> None:
    """Raise PreflightError unless a server could listen on host:port now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PreflightError(
                    f"port {port} on {host} is in use; choose another with --port"
                ) from None
            raise PreflightError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _check_datastore(argv: Sequence[str], options: Options) -> None:
    from transformers import AutoTokenizer

    from datastores import DatastoreError, check_folder
    from sglang_ext.models.tokenizers import fingerprint

    tokenizer_path = flag_value(argv, "--tokenizer-path", "--model-path", "--model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        check_folder(options.datastore, fingerprint(tokenizer), shared=options.datastore_shared)
    except DatastoreError as error:
        raise PreflightError(f"--datastore: {error}") from None
