"""The command `sglang-ext pd`: prefill servers, decode servers and a router, on one machine."""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_ext import options
from sglang_ext.commands import arguments
from sglang_ext.disaggregation.cluster import Cluster, ClusterError, Member
from sglang_ext.disaggregation.transfer import BACKENDS, check_transfer_backend
from sglang_ext.preflight import PreflightError, check_port
from sglang_ext.servers.flags import flag_value
from sglang_ext.servers.processes import end_as_ctrl_c, free_port

DEFAULT_PORT = 30000
_FAILED = 1
_USAGE_ERROR = 2
_HOST = "127.0.0.1"
# What the router may wait for an answer, in seconds; SGLang's own limits end requests earlier.
_ROUTER_TIMEOUT_S = 1800
# Flags that the command sets for each server.
_OWN_FLAGS = ("--port", "--host", "--disaggregation-mode", "--disaggregation-bootstrap-port")
_ROUTERS = {
    "mini": ("sglang_ext.disaggregation.mini_router", "--mini-lb"),
    "rust": ("sglang_router.launch_router",),
}
# The headers that the Rust router passes on begin so (Authorization is one more).
_RUST_CARRIES = "x-request-id-"


def add_commands(commands: Any) -> None:
    """Add `pd` to the command line's subparsers."""
    command = commands.add_parser(
        "pd",
        help="prefill servers, decode servers and a router; takes all flags of serve as well",
        description="Start prefill and decode servers and a router in front of them, and stop them "
        "together. Flags that are not listed here go to every server (`sglang serve --help`); "
        "speculation runs on the decode servers.",
        allow_abbrev=False,
    )
    command.add_argument("--host", default=_HOST, help="the router's address [%(default)s]")
    command.add_argument(
        "--port", type=arguments.port, default=DEFAULT_PORT, help="the router's port [%(default)d]"
    )
    command.add_argument(
        "--prefill", type=arguments.whole_number, default=1, help="prefill servers [%(default)d]"
    )
    command.add_argument(
        "--decode", type=arguments.whole_number, default=1, help="decode servers [%(default)d]"
    )
    command.add_argument("--prefill-flags", default="", help="further flags of prefill servers")
    command.add_argument("--decode-flags", default="", help="further flags of decode servers")
    command.add_argument(
        "--transfer-backend", choices=tuple(BACKENDS), default="mooncake",
        help="what moves the KV [%(default)s]",
    )  # fmt: skip
    command.add_argument(
        "--router", choices=tuple(_ROUTERS), default="mini",
        help="of sglang-router; rust has policies and retries, drops custom_params [%(default)s]",
    )  # fmt: skip
    command.add_argument("--router-flags", default="", help="further flags of the router")
    command.add_argument(
        "--restart", type=arguments.switch, default=True, metavar="0|1",
        help="start again what ends; 0: stop all with it [1]",
    )  # fmt: skip
    command.add_argument(
        "--log-dir", type=Path, help="folder for the servers' output [a temporary one]"
    )
    options.add_flags(command)
    command.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Start all, stay with them until Ctrl-C or SIGTERM; returns the exit code."""
    try:
        check_command(args)
        options.export_flags(args, os.environ)
        members = plan_members(args)
        folder = args.log_dir or Path(tempfile.mkdtemp(prefix="sglang-ext-pd-"))
        folder.mkdir(parents=True, exist_ok=True)
    except (options.OptionError, PreflightError, OSError) as error:
        print(f"sglang-ext pd: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    _say(f"starting {', '.join(m.name for m in members)}; their output is in {folder}")
    try:
        with end_as_ctrl_c(), Cluster(members, folder, _say, args.restart) as cluster:
            cluster.wait()
            _say(f"ready: http://{args.host}:{args.port}")
            cluster.watch()
    except ClusterError as error:
        _say(str(error))
    return _FAILED


def check_command(args: argparse.Namespace) -> None:
    """Check what can be checked before anything is started.

    Raises:
        PreflightError: a flag or a package is missing, or cannot be used here.
        OptionError: an option's value is not usable.
    """
    if _model_of(args.rest) is None:
        raise PreflightError("--model is missing: a path, a hub id, or a name of `models list`")
    for flags in (args.rest, shlex.split(args.prefill_flags), shlex.split(args.decode_flags)):
        for name in _OWN_FLAGS:
            if flag_value(flags, name) is not None:
                raise PreflightError(f"{name} is set by `sglang-ext pd` for each of its servers")
    if find_spec("sglang_router") is None:
        raise PreflightError("the router needs sglang-router: pip install 'sglang-ext[pd]'")
    if args.router == "rust":
        _check_rust_router(options.export_flags(args, dict(os.environ)).namespace_header)
    check_port(args.host, args.port)
    check_transfer_backend(args.transfer_backend)


def _check_rust_router(namespace_header: str) -> None:
    """sglang-router 0.3.2 (header_utils.rs) drops what it does not know, as a tenant's name.

    Raises:
        PreflightError: all tenants would share one namespace.
    """
    if namespace_header and not namespace_header.lower().startswith(_RUST_CARRIES):
        raise PreflightError(
            f"--router rust does not pass the header {namespace_header} on, so that all tenants "
            f"would share one namespace: give --namespace-header {_RUST_CARRIES}namespace, which "
            "it passes on, and have your gateway set that; or --namespace-header '' where there "
            "are no tenants; or --router mini"
        )


def plan_members(args: argparse.Namespace) -> list[Member]:
    """The servers, then the router, with ports of their own."""
    ports = _free_ports(2 * args.prefill + args.decode)
    prefill, bootstrap = ports[: args.prefill], ports[args.prefill : 2 * args.prefill]
    decode = ports[2 * args.prefill :]
    common = [*args.rest, "--disaggregation-transfer-backend", args.transfer_backend]
    members = [
        Member(
            f"prefill {number}",
            _server(common, port, "prefill", "--disaggregation-bootstrap-port", str(boot))
            + shlex.split(args.prefill_flags),
            _url(port),
            # Nothing that it reads is drafted for there, and one process writes to the folder.
            without=[options.env_name("datastore")],
        )
        for number, (port, boot) in enumerate(zip(prefill, bootstrap, strict=True), 1)
    ]
    shared = {options.env_name("datastore_shared"): "1"} if args.decode > 1 else {}
    members += [
        Member(
            f"decode {number}",
            _server(common, port, "decode") + shlex.split(args.decode_flags),
            _url(port),
            env=shared,
        )
        for number, port in enumerate(decode, 1)
    ]
    router = [sys.executable, "-m", *_ROUTERS[args.router], "--pd-disaggregation"]
    router += ["--host", args.host, "--port", str(args.port)]
    router += ["--request-timeout-secs", str(_ROUTER_TIMEOUT_S)]
    for port, boot in zip(prefill, bootstrap, strict=True):
        router += ["--prefill", _url(port), str(boot)]
    for port in decode:
        router += ["--decode", _url(port)]
    router += shlex.split(args.router_flags)
    where = "127.0.0.1" if args.host == "0.0.0.0" else args.host
    return [*members, Member("router", router, f"http://{where}:{args.port}", last=True)]


def _server(common: Sequence[str], port: int, mode: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "sglang_ext.cli", "serve", *common,
        "--host", _HOST, "--port", str(port), "--disaggregation-mode", mode, *more,
    ]  # fmt: skip


def _url(port: int) -> str:
    return f"http://{_HOST}:{port}"


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        port = free_port()
        if port not in ports:
            ports.append(port)
    return ports


def _model_of(flags: Sequence[str]) -> str | None:
    if flags and not flags[0].startswith("-"):
        return flags[0]
    return flag_value(flags, "--model-path", "--model")


def _say(line: str) -> None:
    print(f"sglang-ext pd: {line}", file=sys.stderr, flush=True)
