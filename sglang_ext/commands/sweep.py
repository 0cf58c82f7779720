"""The command `sglang-ext sweep`: what it is asked for, and what it says."""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_ext import extras
from sglang_ext.commands import arguments
from sglang_ext.models import ModelError, is_whisper, resolve
from sglang_ext.servers.flags import flag_value
from sglang_ext.servers.processes import end_as_ctrl_c
from sglang_ext.sweep.data_files import CARRIED, own_folder
from sglang_ext.sweep.methods import AUDIO, RETRANSLATION, TEXT
from sglang_ext.sweep.plan import Plan

_FAILED = 1
_USAGE_ERROR = 2
_DISTURBED = 3
# Where --data is not given: a folder of the user's data by kind of workload, else the package's.
_FOLDERS = {TEXT: "text", AUDIO: "speech", RETRANSLATION: "parallel"}


@dataclasses.dataclass(frozen=True)
class Size:
    """What the options that set a sweep's length are where they are not given."""

    workloads: tuple[str, ...] = ("mt-bench", "gsm8k", "long")
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    rates: tuple[float, ...] = ()
    repeats: int = 3
    most_repeats: int = 0
    minutes: float = 0.0
    prompts: int = 32
    max_tokens: int = 128


FULL = Size()
QUICK = Size(
    workloads=("mt-bench", "gsm8k"), batches=(1, 4), repeats=2, most_repeats=6, minutes=9.0,
    prompts=4, max_tokens=24,
)  # fmt: skip
# Of a Whisper; transcripts end by themselves.
_WHISPER: dict[str, Any] = {"workloads": ("audio",), "max_tokens": 224}


class SweepUsageError(Exception):
    """What is wrong with the command line, in a line."""


def add_commands(commands: Any) -> None:
    """Add `sweep` to the command line's subparsers."""
    command = commands.add_parser(
        "sweep",
        help="throughput against latency, of methods side by side",
        description="Measure decoding methods side by side on running servers, and draw "
        "throughput against latency. The same command again goes on where it stopped.",
        allow_abbrev=False,
    )
    _add_what(command)
    _add_how_much(command)
    _add_where(command)
    command.set_defaults(func=run)
    _add_subcommands(command)


def _add_what(command: argparse.ArgumentParser) -> None:
    """Options of the points that are measured."""
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="results folder: a new one, or this sweep's"
    )
    command.add_argument(
        "--model", default="smollm2-135m-instruct",
        help="path, hub id or name of `sglang-ext models list` [%(default)s]",
    )  # fmt: skip
    command.add_argument(
        "--methods", type=arguments.names, metavar="A,B",
        help="see docs/sweep.md [ar, n-gram peers, SSSD; of a Whisper ar, SpecASR]",
    )  # fmt: skip
    command.add_argument(
        "--workloads", type=arguments.names, metavar="A,B",
        help=f"[{_shown(FULL.workloads)}; of a Whisper audio]",
    )  # fmt: skip
    command.add_argument(
        "--batches", type=arguments.numbers(int), metavar="N,M",
        help=f"requests in flight; \"\": none [{_shown(FULL.batches)}]",
    )  # fmt: skip
    command.add_argument(
        "--rates", type=arguments.numbers(float), metavar="X,Y",
        help="requests a second, Poisson arrivals [none]",
    )  # fmt: skip


def _add_how_much(command: argparse.ArgumentParser) -> None:
    """Options of how long each point is measured."""
    command.add_argument(
        "--repeats",
        type=arguments.whole_number,
        metavar="N",
        help=f"runs of each point [{FULL.repeats}]",
    )
    command.add_argument(
        "--most-repeats", type=arguments.whole_number, metavar="N",
        help="repeat up to N times where SSSD and AR, or its best peer, are too close to tell "
        "which is faster [as --repeats; --quick: 6]",
    )  # fmt: skip
    command.add_argument(
        "--minutes", type=arguments.minutes, metavar="X",
        help="once each point was run, begin no repeat that would end later than this; 0: no "
        "limit [0; --quick: 9]",
    )  # fmt: skip
    command.add_argument(
        "--prompts",
        type=arguments.whole_number,
        metavar="N",
        help=f"measured, of each workload [{FULL.prompts}]",
    )
    command.add_argument(
        "--max-tokens",
        type=arguments.whole_number,
        metavar="N",
        help=f"of an output [{FULL.max_tokens}]",
    )


def _add_where(command: argparse.ArgumentParser) -> None:
    """Options of the data and the servers, and those that set others."""
    command.add_argument(
        "--data", type=Path, metavar="DIR",
        help="the workloads' data: texts, or speech with references.tsv [$SGLANG_EXT_DATA, else "
        "the package's]",
    )  # fmt: skip
    command.add_argument(
        "--url", type=arguments.named_url, action="append", default=[], metavar="NAME=URL",
        help="take a running server for plain, ngram, ngram-corpus, sssd, specasr or ssbd instead "
        "of starting one; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--server-flags", default="", metavar="FLAGS",
        help="further flags of all servers that are started, in one string",
    )  # fmt: skip
    command.add_argument("--seed", type=int, default=0, metavar="S", help="[%(default)s]")
    command.add_argument(
        "--quick", action="store_true",
        help="what is not given is small: under 10 minutes on two cores",
    )  # fmt: skip


def _add_subcommands(command: argparse.ArgumentParser) -> None:
    reports = command.add_subparsers(dest="sweep_command", metavar="report")
    report = reports.add_parser(
        "report", help="tables, plots and report.html again, from a results folder"
    )
    report.add_argument("folder", type=Path, metavar="DIR")
    report.add_argument(
        "--performance", type=Path, metavar="DOCS", help="write DOCS/performance.md as well"
    )
    report.set_defaults(func=run_report)
    compare = reports.add_parser("compare", help="how far two sweeps of the same points agree")
    compare.add_argument("first", type=Path, metavar="DIR")
    compare.add_argument("second", type=Path, metavar="DIR")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    compare.set_defaults(func=run_compare)


@end_as_ctrl_c()
def run(args: argparse.Namespace) -> int:
    """Measure, then report; returns the exit code (1: a run failed or is missing, 3: disturbed)."""
    try:
        extras.require("sweep", ["sweep", "speech"] if is_whisper(args.model) else ["sweep"])
    except extras.MissingExtra as error:
        print(f"sglang-ext sweep: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    from sglang_ext.servers.started_server import ServerError
    from sglang_ext.sweep.methods import UnknownMethod
    from sglang_ext.sweep.results import Results, ResultsError
    from sglang_ext.sweep.runner import SweepError
    from sglang_ext.sweep.workloads import WorkloadError

    try:
        if args.out is None:
            raise SweepUsageError("--out DIR is missing: where the results go")
        plan = plan_of(args)
        workloads, model_path, tokenizer = _load(plan)
        with Results.create_or_resume(args.out, plan) as results:
            return _sweep(args, results, workloads, model_path, tokenizer)
    except (ServerError, SweepError) as error:
        print(f"sglang-ext sweep: {error}", file=sys.stderr)
        print(_how_to_go_on(args.out), file=sys.stderr)
        return _FAILED
    except (SweepUsageError, ResultsError, WorkloadError, UnknownMethod, ModelError) as error:
        print(f"sglang-ext sweep: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        print(f"\nstopped. {_how_to_go_on(args.out)}", file=sys.stderr)
        raise


def run_report(args: argparse.Namespace) -> int:
    """Make the report of a folder again; returns the exit code."""
    from sglang_ext.sweep.results import Results, ResultsError

    try:
        extras.require("sweep report", ["sweep"])
        if not Results.read(args.folder).points:
            raise ResultsError(f"{args.folder}: no run has ended yet")
        _report(args.folder)
        if args.performance is not None:
            from sglang_ext.sweep.performance import write_performance

            write_performance(args.folder, args.performance)
    except (ResultsError, extras.MissingExtra) as error:
        print(f"sglang-ext sweep report: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Say how far two folders agree; returns the exit code (1: not within their spread)."""
    from sglang_ext.sweep.results import Results, ResultsError
    from sglang_ext.sweep.summary import summarize
    from sglang_ext.sweep.sweep_comparison import compare

    try:
        first, second = (summarize(Results.read(path)) for path in (args.first, args.second))
        figures = compare(first, second)
        if not figures["points"]:
            raise ResultsError(
                "no batch size was measured in both folders, with the same method and workload "
                "and ar beside it"
            )
        if "stated_spread_percent" not in figures:
            raise ResultsError("neither sweep has repeated a point: they state no spread")
    except ResultsError as error:
        print(f"sglang-ext sweep compare: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    for name, value in figures.items():
        print(f"{name:30} {value:.4g}")
    if args.json is not None:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")
    return 0 if figures["within_spread_percent"] == 100.0 else _FAILED


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that the options ask for.

    Raises:
        SweepUsageError, UnknownMethod: an option is wrong.
    """
    from sglang_ext.sweep.methods import SERVERS, default_methods
    from sglang_ext.sweep.workloads import WORKLOADS, kind_of

    whisper = is_whisper(args.model)
    size = QUICK if args.quick else FULL
    size = dataclasses.replace(size, **_WHISPER) if whisper else size
    chosen = {
        field.name: getattr(size, field.name)
        if getattr(args, field.name) is None
        else getattr(args, field.name)
        for field in dataclasses.fields(Size)
    }
    for name in chosen["workloads"]:
        if name not in WORKLOADS:
            raise SweepUsageError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    kinds = {name: kind_of(name) for name in chosen["workloads"]}
    methods = args.methods or default_methods(kinds.values())
    _check_kinds(args.model, whisper, kinds, methods)
    for key, _ in args.url:
        if key not in SERVERS:
            raise SweepUsageError(f"--url {key}=...: expected one of {', '.join(SERVERS)}")
    _check_packages(methods, [key for key, _ in args.url])
    if not chosen["batches"] and not chosen["rates"]:
        raise SweepUsageError("neither --batches nor --rates: there is nothing to measure")
    return Plan(
        model=args.model,
        methods=tuple(methods),
        seed=args.seed,
        data=str(_data(args.data, set(kinds.values()))),
        server_flags=tuple(shlex.split(args.server_flags)),
        **chosen,
    )


def _check_kinds(
    model: str, whisper: bool, kinds: Mapping[str, str], methods: Sequence[str]
) -> None:
    """Raises SweepUsageError, UnknownMethod: a workload is not for the model, or for a method."""
    from sglang_ext.sweep.methods import method

    chosen = [method(name) for name in methods]
    for workload, kind in kinds.items():
        if (kind == AUDIO) != whisper:
            raise SweepUsageError(
                f"workload {workload!r} ({kind}) is not for {model}, which "
                + ("reads speech: --workloads audio" if whisper else "reads text, not speech")
            )
        for made in chosen:
            if kind not in made.workload_kinds:
                raise SweepUsageError(
                    f"method {made.name!r} cannot decode workload {workload!r} ({kind}); it is "
                    f"for {', '.join(sorted(made.workload_kinds))}"
                )


def _check_packages(methods: Sequence[str], running: Collection[str]) -> None:
    """Raises SweepUsageError: a server to be started would lack a package."""
    from sglang_ext.sweep.methods import method

    chosen = [made for name in methods if (made := method(name)).server not in running]
    lacking = [made for made in chosen if made.module and find_spec(made.module) is None]
    if lacking:
        without = ",".join(name for name in methods if method(name) not in lacking)
        raise SweepUsageError(
            f"method {lacking[0].name!r} needs the package of {lacking[0].module}, which is not "
            "installed: `make peers`, or docs/peers.md"
            + (f"; without it: --methods {without}" if without else "")
        )


def _data(given: Path | None, kinds: Collection[str]) -> Path:
    if given is None:
        return own_folder(_FOLDERS[next(iter(kinds)) if len(kinds) == 1 else TEXT]) or CARRIED
    if not given.exists():
        raise SweepUsageError(f"--data {given}: there is no such file or folder")
    return given.absolute()


def _load(plan: Plan) -> tuple[dict[str, Any], str, Any]:
    """The workloads by name, the model's path, and its tokenizer.

    Raises:
        SweepUsageError, WorkloadError, ModelError: what is wrong with one of them.
    """
    from sglang_ext.sweep.workloads import load_workload

    path = resolve(plan.model)
    tokenizer, context_len = _tokenizer(plan, path)
    workloads = {
        name: load_workload(
            name, tokenizer, data=Path(plan.data), prompts=plan.prompts,
            max_tokens=plan.max_tokens, seed=plan.seed, context_len=context_len,
        )
        for name in plan.workloads
    }  # fmt: skip
    return workloads, path, tokenizer


def _tokenizer(plan: Plan, path: str) -> tuple[Any, int]:
    """The model's tokenizer, and the tokens that a request may have."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        config = AutoConfig.from_pretrained(path).get_text_config()
    except Exception as error:  # of many kinds: no files, no network, a damaged JSON
        reason = " ".join(str(error).split())[:200]
        raise SweepUsageError(
            f"--model {plan.model}: no tokenizer can be loaded: {reason}"
        ) from None
    given = flag_value(plan.server_flags, "--context-length")
    known = getattr(config, "max_position_embeddings", None) or config.max_target_positions
    return tokenizer, int(given or known)


def _sweep(
    args: argparse.Namespace, results: Any, workloads: dict[str, Any], path: str, tokenizer: Any
) -> int:
    """Measure what is left and report; returns the exit code."""
    from sglang_ext.sweep.methods import METHODS, servers_for
    from sglang_ext.sweep.runner import Runner
    from sglang_ext.sweep.servers import Servers

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    _note_environment(results)
    plan = results.plan
    flags = servers_for(METHODS[name] for name in plan.methods)
    with Servers(plan.model, flags, plan.server_flags, dict(args.url), _say, args.out) as servers:
        runner = Runner(results, workloads, METHODS, servers, path, decode, _say)
        _say(f"{args.out}: {len(runner.left())} of {sum(1 for _ in plan.order())} runs to make")
        runner.run()
    disturbed = any(p.error is None for p in results.points) and _report(args.out)
    for problem in runner.problems:
        _say(f"sglang-ext sweep: {problem}")
    missing = len(runner.missing())
    if missing:
        _say(f"{missing} runs have no result. {_how_to_go_on(args.out)}")
    if runner.problems or missing:
        return _FAILED
    return _DISTURBED if disturbed else 0


def _note_environment(results: Any) -> None:
    from sglang_ext.sweep import provenance

    now = provenance.collect()
    before = results.environment
    if not before:
        results.write_environment(now)
        return
    changes = provenance.changes(before, now)
    for change in changes:
        _say(f"this is not what the sweep began with: {change}")
    resumed = {"started": now["started"], "changes": changes}
    results.write_environment(before | {"resumed": [*before.get("resumed", []), resumed]})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _report(folder: Path) -> bool:
    """Write a folder's report; returns whether its repeats bear out no least ratio."""
    from sglang_ext.sweep.report import write_report

    summary = write_report(folder)
    print(f"{folder / 'report.html'}, summary.md, summary.csv, figures.json")
    for line in summary.doubts():
        _say(f"sglang-ext sweep: {line}")
    return summary.disturbed


def _how_to_go_on(folder: Path) -> str:
    return (
        f"What is finished is in {folder}; the same command goes on with it, and "
        f"`sglang-ext sweep report {folder}` shows it."
    )


def _shown(values: Sequence[object]) -> str:
    return ",".join(map(str, values))
