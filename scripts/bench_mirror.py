"""Mirror-SD against plain decoding (AR), ordinary speculative decoding (SD) and SSSD (issue 29).

The devices are cores: the target has one, the draft model another, as the paper's GPU and NPU; SD
is measured on the same split, and with both cores for each model in turn. One server is up at a
time, and each task begins one anew, as a server's speed depends on where in memory it came to lie.
On each, AR and its other rows take turns on every prompt of Spec-Bench's six tasks and code, and at
being first; each answer reads its prompt anew. No lens was fitted on these prompts. SD waits for
its draft in every step and verifies it whole: a window of gamma tokens, fewer where so many do not
pay in the mean. "SD, auto" is what a server does by itself (--budget auto, retrieval): it waits
while another token pays, and verifies those that pay. So does Mirror, which drafts for what the
target's exit foresees: by the LM head on its state (head: the paper's) or by a fitted lens (lens:
ours). The draft model gives one token a pass, or several: where the request's own text drafts for
it (retrieval), or its streams (streaming, with --streams).

Figures: mismatches (greedy outputs that are not AR's) of outputs_compared, prompts_compared;
speedup_mirror_vs_ar, _vs_vanilla (by SD on the same split), _vs_vanilla_both (by SD with both
cores), _vs_sd_auto, _vs_sd_auto_both, all of "Mirror lens, retrieval", means over tasks;
tokens_s_*, accept_length_*, step_ms_*, speedup_* of each row; hidden_share (of the draft model's
drafting what no step waited for, in tasks_where_drafting_fits into the suffix; hidden_share_all: in
all); fallback_share (drafts that were not there when asked for); latency_law_error (a step's time
by Eq. 10 from its parts, measured in the same steps; _foretold: from what SD waits for its drafts);
draft_steps_per_window (passes of the draft model for gamma tokens that SD waits for), _retrieval,
_streaming, and draft_steps_ratio_*; fallback_exitL_kappaK (outcomes that the exit behind layer L
did not have among its first K candidates), fallback_rises; mirrored_retrieval_critical_ms and
unmirrored_ at batch 32; distribution_* (sampling at T = 1 and others, as check_sampling has it);
executor_kills, wrong_after_kills, hangs_after_kills.

    python -m scripts.bench_mirror [--quick] [--json FILE] [--folder DIR] [--parts NAME,...]
        [--minutes N] [--list] [--plots DIR] [--model TARGET] [--draft-model DRAFT]
        [--draft-weights FORMAT] [--target-weights FORMAT] [--streams DIR] [--prompts N]
        [--prompt-tokens N] [--tokens N] [--window N] [--batches N,...] [--kills N]
        [--lens-seconds N]

A whole run takes some eight hours, so it has parts of under half an hour (--list). What they find
is kept in --folder: the same command goes on with what is missing, and --minutes begins no part
that would end later. The figures are those of all that is in the folder. Two cores, and 13 GB of
free memory. Exits with 1 where a limit of issue 29 is broken, a line for each.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import httpx

from scripts.lib.figures import parser, report
from scripts.lib.mirror_folder import ResultFolder
from scripts.lib.mirror_limits import broken, unmeasured
from scripts.lib.mirror_parts import Part, Run, all_parts
from scripts.lib.mirror_results import Results
from scripts.lib.mirror_rows import DRAFT, MOST_BATCH, TARGET, of_tasks, splits
from scripts.lib.mirror_runs import Servers, Settings
from scripts.lib.mirror_tables import tables
from scripts.lib.result_page import aligned
from scripts.lib.spec_bench import Prompt, spec_bench, unseen_texts
from sglang_ext.models import resolve

# Prompts whose outputs are compared, and that are sampled from.
_SHORT_TOKENS = 128
_QUICK = {"prompts": 1, "tokens": 32, "batches": "", "kills": 2, "lens_seconds": 150.0}


def main() -> int:
    options = read_options()
    parts = chosen_parts(options)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = ResultFolder(options.folder or Path(scratch), settings_of(options))
            if options.list:
                return show(parts, folder)
            return measured(options, parts, folder)
        except (ValueError, MemoryError, RuntimeError, httpx.HTTPError) as error:
            print(f"bench_mirror: error: {error or type(error).__name__}", file=sys.stderr)
            return 2


def read_options() -> argparse.Namespace:
    """The command line, checked."""
    args = parser(__doc__)
    args.set_defaults(model=TARGET)
    add = args.add_argument
    add("--draft-model", default=DRAFT, metavar="NAME", help="name or path [%(default)s]")
    add("--draft-weights", default="auto", metavar="FORMAT",
        help="of the draft model, as --mirror-weights [%(default)s]")  # fmt: skip
    add("--target-weights", default="fp32", metavar="FORMAT",
        help="of the target, as --cpu-weights [%(default)s]")  # fmt: skip
    add("--streams", default="", metavar="DIR",
        help="of `drafter train --kind streaming`: the draft model's")  # fmt: skip
    add("--folder", type=Path, metavar="DIR", help="keep results there, and go on from them")
    add("--parts", default="*", metavar="NAME,...", help="these alone, as lens-*,kills? [all]")
    add("--minutes", type=float, metavar="N", help="begin no part that would end later [no limit]")
    add("--list", action="store_true", help="name the parts, and what is left of them")
    add("--prompts", type=int, default=2, metavar="N", help="of each task [%(default)s]")
    add("--prompt-tokens", type=int, default=256, metavar="N",
        help="most of a prompt, where a task has such [%(default)s]")  # fmt: skip
    add("--tokens", type=int, default=64, metavar="N", help="of an answer [%(default)s]")
    add("--window", type=int, default=7, metavar="N", help="gamma [%(default)s]")
    add("--batches", default="2,4", metavar="N,...", help="beside batch 1 [%(default)s]")
    add("--kills", type=int, default=20, metavar="N", help="of the draft process [%(default)s]")
    add("--lens-seconds", type=float, default=500.0, metavar="N",
        help="most to fit a lens that is not kept yet [%(default)g]")  # fmt: skip
    add("--plots", type=Path, metavar="DIR", help="draw fallbacks by kappa and depth, PNG and SVG")
    options = args.parse_args()
    if options.quick:
        for name, value in _QUICK.items():
            if getattr(options, name) == args.get_default(name):
                setattr(options, name, value)
    check_options(args, options)
    return options


def check_options(args: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where an option cannot be met; makes numbers of --batches."""
    try:
        options.batches = [int(batch) for batch in options.batches.split(",") if batch]
    except ValueError:
        args.error(f"--batches {options.batches}: whole numbers, comma-separated")
    if not all(1 < batch <= MOST_BATCH for batch in options.batches):
        args.error(f"--batches: numbers of 2 to {MOST_BATCH}")
    for name in ("prompts", "prompt_tokens", "tokens", "window"):
        if getattr(options, name) < 1:
            args.error(f"--{name.replace('_', '-')} must be at least 1")
    if len(os.sched_getaffinity(0)) < 2:
        args.error("two cores are needed: one for the target, one for the draft model")
    for pattern in options.parts.split(","):
        if not any(fnmatch(part.name, pattern) for part in all_parts()):
            known = ", ".join(part.name for part in all_parts())
            args.error(f"--parts {pattern}: there is none; known: {known}")


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """The parts that --parts names; of a quick run without it some."""
    patterns = options.parts.split(",")
    named = [p for p in all_parts() if any(fnmatch(p.name, pattern) for pattern in patterns)]
    return [p for p in named if p.quick] if options.quick and patterns == ["*"] else named


def settings_of(options: argparse.Namespace) -> Settings:
    """What all parts agree in."""
    return Settings(
        options.model, options.draft_model, options.streams, options.tokens, options.window,
        options.prompts, options.prompt_tokens, options.lens_seconds, options.draft_weights,
        options.target_weights,
    )  # fmt: skip


def show(parts: Sequence[Part], folder: ResultFolder) -> int:
    """List parts."""
    for part in parts:
        kept = folder.part(part.name)
        state = "done" if kept.complete else f"{len(kept.answers)} answers kept"
        print(f"{part.name:22} about {part.minutes:3.0f} min   {state}")
    return 0


def measured(options: argparse.Namespace, parts: Sequence[Part], folder: ResultFolder) -> int:
    """Run what is missing, and report all that is there; the exit code."""
    config = json.loads((Path(resolve(options.model)) / "config.json").read_text())
    layers = config["num_hidden_layers"]
    servers = splits(sorted(os.sched_getaffinity(0)), bool(options.streams))
    with Servers(settings_of(options), layers) as started:
        run_parts(run_of(options, servers, started), parts, folder, options.minutes)
    results = Results(servers, folder.answers(), layers, options.window, folder.figures())
    for table in tables(results):
        print(f"\n{aligned(table)}")
    if options.plots is not None:
        from scripts.lib.mirror_plots import write_plots

        write_plots(options.plots, results)
    named = {
        "target": options.model,
        "target_weights": options.target_weights,
        "draft": options.draft_model,
        "draft_weights": options.draft_weights,
    }
    print("\n" + ", ".join(f"{name.replace('_', ' ')}: {it}" for name, it in named.items()))
    figures = report(results.figures() | {"window": options.window}, options.json)
    if options.json is not None:
        note_pair(options.json, named)
    left = [part.name for part in all_parts() if not folder.part(part.name).complete]
    return judged(figures, whole=not left and not options.quick)


def run_of(options: argparse.Namespace, servers: dict, started: Servers) -> Run:
    """What the parts need."""
    unseen = unseen_texts()
    known = spec_bench(options.model, max_prompt_tokens=1024)
    prompts = [prompt for prompt in known if prompt.text in unseen]
    by_task = of_tasks(prompts, options.prompts, options.prompt_tokens)
    short: list[Prompt] = [p for p in prompts if len(p.input_ids) <= _SHORT_TOKENS]
    return Run(servers, started, by_task, short, options.kills, options.batches, options.quick)


def run_parts(run: Run, parts: Sequence[Part], folder: ResultFolder, minutes: float | None) -> None:
    """Those that are not complete, one after the other, as far as the time goes."""
    begun = time.monotonic()
    for number, part in enumerate(parts, 1):
        kept = folder.part(part.name)
        passed = (time.monotonic() - begun) / 60
        if kept.complete:
            continue
        if minutes is not None and passed + part.minutes > minutes:
            print(f"-- {part.name}: left for the next time ({part.minutes:g} min)", flush=True)
            continue
        print(f"-- {part.name}, part {number} of {len(parts)}, {passed:.0f} min so far", flush=True)
        kept.finish(part.do(run, kept))


def judged(figures: dict[str, float], whole: bool) -> int:
    """Print what breaks a limit, and what was not measured; the exit code."""
    lines = list(broken(figures, whole))
    for line in lines:
        print(f"broken: {line}")
    if missing := unmeasured(figures):
        print(f"not measured: {', '.join(missing)}")
    return int(bool(lines))


def note_pair(path: Path, named: dict[str, str]) -> None:
    """Name the models beside the figures."""
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, **named}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
