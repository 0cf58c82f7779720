"""The console command: `sglang-ext serve | pd | transcribe | captions | sweep | ...`."""

# SGLang's CPU engine needs a stand-in before any of its modules load, in this process and in
# the ones it spawns (they import this module again), so this comes before everything else.
from sglang_ext.cpu.install import hide_gpu_packages, install

ON_CPU = install()
if ON_CPU:
    hide_gpu_packages()

import sys  # noqa: E402

from sglang_ext.servers.step_aside import copies_beside_a_server, step_aside  # noqa: E402

if copies_beside_a_server(sys.argv[1:]):
    # Before the imports, which take longer than many a copy. Not by the command itself: who calls
    # `main` in a process of his own keeps his priority.
    step_aside()

import argparse  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from sglang_ext import __version__, commands, models, options  # noqa: E402
from sglang_ext.cpu import fork_server  # noqa: E402
from sglang_ext.preflight import PreflightError, check_launch  # noqa: E402
from sglang_ext.servers.flag_names import resolved  # noqa: E402
from sglang_ext.servers.flags import flag_value, set_flag  # noqa: E402

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code (2: the command line is wrong)."""
    parser = argparse.ArgumentParser(
        prog="sglang-ext", description="SGLang with training-free speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"sglang-ext {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = subparsers.add_parser(
        "serve",
        help="start an SGLang server; takes all of SGLang's flags as well",
        description="Start an SGLang server. Flags that are not listed here are SGLang's own "
        "(`sglang serve --help`).",
        allow_abbrev=False,
    )
    options.add_flags(serve)
    serve.set_defaults(func=run_serve)
    for command in commands.ALL:
        command.add_commands(subparsers)
    args, rest = parser.parse_known_args(argv)
    if rest and args.func not in (run_serve, *commands.TAKE_SERVER_FLAGS):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        return args.func(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run_serve(args: argparse.Namespace) -> int:
    """Start the server and stay with it until it ends."""
    forks = ON_CPU and fork_server.begin()
    try:
        server_args = _prepare(args)
    except (options.OptionError, models.ModelError, PreflightError, ValueError) as error:
        print(f"sglang-ext serve: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    if forks:
        fork_server.use()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _prepare(args: argparse.Namespace):
    """SGLang's ServerArgs for this command line, everything checked that can be without a model.

    Raises:
        OptionError, ModelError, PreflightError, ValueError: what is wrong, in one line.
    """
    argv, named = resolved(args.rest)
    for option, value in named.items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    chosen = options.export_flags(args, os.environ)
    if argv and not argv[0].startswith("-"):
        argv = ["--model-path", *argv]
    model = flag_value(argv, "--model-path", "--model")
    if model is None:
        raise PreflightError("--model is missing: a path, a hub id, or a name of `models list`")
    argv = set_flag(argv, models.resolve(model), "--model-path", "--model")
    if chosen.draft_model:
        os.environ[options.env_name("draft_model")] = models.resolve(chosen.draft_model)
        chosen = options.Options.from_env()
    if "://" in chosen.datastore:
        chosen = _pull_datastore(chosen.datastore, argv)
    if flag_value(argv, "--served-model-name") is None:
        argv += ["--served-model-name", model]
    if ON_CPU:
        from sglang_ext.cpu.defaults import default_cpu_args
        from sglang_ext.disaggregation.on_cpu import prepare_environment

        if flag_value(argv, "--disaggregation-mode") is not None:
            prepare_environment()
        argv += default_cpu_args(argv, chosen.cpu_weights)
    check_launch(argv, chosen)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    return server_args


def _pull_datastore(address: str, argv: Sequence[str]) -> options.Options:
    """The options with the datastore at an address as a folder of the user's cache.

    Raises:
        PreflightError: it cannot be had, or is another tokenizer's.
    """
    from datastores import DatastoreError
    from sglang_ext.commands.datastore.pulled import local_datastore

    tokenizer = flag_value(argv, "--tokenizer-path")
    model = flag_value(argv, "--model-path", "--model")
    try:
        folder = local_datastore(address, tokenizer or model or "")
    except (DatastoreError, OSError) as error:
        raise PreflightError(f"--datastore: {error}") from None
    os.environ[options.env_name("datastore")] = folder
    return options.Options.from_env()


if __name__ == "__main__":
    sys.exit(main())
