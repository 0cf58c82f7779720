"""Mirror-SD against plain decoding (AR), ordinary speculative decoding (SD) and SSSD (issue 29).

The devices are cores: the target has one, the draft model another, as the paper's GPU and NPU; SD
is measured on the same split, and with both cores for each model in turn. One server is up at a
time. On each, AR and its other rows take turns on every prompt of Spec-Bench's six tasks and code,
and at being first; each answer reads its prompt anew. Rows are compared with the AR of their own
server. SD waits for its draft in every step; Mirror drafts for what the target's exit foresees: by
the LM head on its state (head: the paper's) or by a fitted lens (lens: ours). The draft model gives
one token a pass, or several: where the request's own text drafts for it (retrieval), or its
streams (streaming, with --streams).

Figures: mismatches (greedy outputs that are not AR's) of outputs_compared; speedup_mirror_vs_ar,
_vs_vanilla (by SD on the same split), _vs_vanilla_both (by SD with both cores: from two servers),
all of "Mirror lens, retrieval", mean over tasks; tokens_s_*, accept_length_*, step_ms_*, speedup_*
of each row; hidden_share (of the draft model's drafting, what no step waited for); fallback_share
(drafts that were not there when asked for); latency_law_error (a step's time by Eq. 10 from its
parts, measured in the same steps); draft_steps_per_window (passes of the draft model for gamma
tokens that SD waits for), _retrieval, _streaming, and draft_steps_ratio_*; fallback_exitL_kappaK
(outcomes that the exit behind layer L did not have among its first K candidates); executor_kills,
wrong_after_kills, hangs_after_kills.

    python -m scripts.bench_mirror [--quick] [--json FILE] [--model TARGET] [--draft-model DRAFT]
        [--streams DIR] [--prompts N] [--tokens N] [--batches N,...] [--kills N] [--window N]
        [--servers NAME,...] [--plots DIR]

Two cores and 10 GB of free memory; the quick run takes some 15 minutes, of the full one most is
AR. Exits with 1 where an output differs, or after a kill one is wrong or missing.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.lib.figures import parser, report
from scripts.lib.mirror_results import Results, tables
from scripts.lib.mirror_rows import AR, DRAFT, MIRROR, SD, TARGET, Split, of_tasks, splits
from scripts.lib.mirror_runs import Answer, Client, Kills, by_turns, kill_executors, serving
from scripts.lib.result_page import aligned
from scripts.lib.spec_bench import Prompt, spec_bench
from sglang_ext.models import resolve

# Longer prompts take a 1.5B target on one core half a minute each, in every row.
MOST_PROMPT_TOKENS, QUICK_PROMPT_TOKENS = 512, 128
QUICK_TASKS = 3

Prompts = Mapping[str, Sequence[Prompt]]


def main() -> int:
    options = read_options()
    most = QUICK_PROMPT_TOKENS if options.quick else MOST_PROMPT_TOKENS
    prompts: Prompts = of_tasks(spec_bench(options.model, max_prompt_tokens=most), options.prompts)
    if options.quick:
        prompts = dict(list(prompts.items())[:QUICK_TASKS])
    results = run(options, prompts)
    for table in tables(results):
        print(f"\n{aligned(table)}")
    if options.plots is not None:
        from scripts.lib.mirror_plots import write_plots

        write_plots(options.plots, results)
    figures = results.figures() | {"tasks": len(prompts), "window": options.window}
    print(f"\ntarget {options.model}, draft {options.draft_model}; tasks: {', '.join(prompts)}")
    report(figures, options.json)
    if options.json is not None:
        note_pair(options.json, options.model, options.draft_model)
    failures = ("mismatches", "wrong_after_kills", "hangs_after_kills")
    return int(any(figures.get(name, 0) for name in failures) or not figures["outputs_compared"])


def read_options() -> argparse.Namespace:
    """The command line, checked."""
    args = parser(__doc__)
    args.set_defaults(model=TARGET)
    add = args.add_argument
    add("--draft-model", default=DRAFT, metavar="NAME", help="name or path [%(default)s]")
    add("--streams", default="", metavar="DIR",
        help="of `drafter train --kind streaming`: the draft model's")  # fmt: skip
    add("--prompts", type=int, default=2, metavar="N", help="of each task [%(default)s]")
    add("--tokens", type=int, default=96, metavar="N", help="of an answer [%(default)s]")
    add("--window", type=int, default=7, metavar="N", help="gamma [%(default)s]")
    add("--batches", default="2,4", metavar="N,...", help="beside batch 1 [%(default)s]")
    add("--kills", type=int, default=20, metavar="N", help="of the draft process [%(default)s]")
    add("--servers", default="", metavar="NAME,...", help="of the rows' servers only these")
    add("--plots", type=Path, metavar="DIR", help="draw fallbacks by kappa and depth, PNG and SVG")
    options = args.parse_args()
    if options.quick:
        quick = {"prompts": 1, "tokens": 32, "batches": "", "kills": 2}
        for name, value in quick.items():
            if getattr(options, name) == args.get_default(name):
                setattr(options, name, value)
    try:
        options.batches = [int(batch) for batch in options.batches.split(",") if batch]
    except ValueError:
        args.error(f"--batches {options.batches}: whole numbers, comma-separated")
    for name in ("prompts", "tokens", "window"):
        if getattr(options, name) < 1:
            args.error(f"--{name} must be at least 1")
    if len(os.sched_getaffinity(0)) < 2:
        args.error("two cores are needed: one for the target, one for the draft model")
    known = [split.name for split in splits([0, 1], quick=False)]
    options.servers = [name for name in options.servers.split(",") if name]
    if unknown := [name for name in options.servers if name not in known]:
        args.error(f"--servers: {', '.join(unknown)}; known: {', '.join(known)}")
    return options


def run(options: argparse.Namespace, prompts: Prompts) -> Results:
    """Start one server after the other, and ask each."""
    config = json.loads((Path(resolve(options.model)) / "config.json").read_text())
    layers = config["num_hidden_layers"]
    cores = sorted(os.sched_getaffinity(0))
    wanted = [
        split
        for split in splits(cores, options.quick, bool(options.streams))
        if not options.servers or split.name in options.servers
    ]
    answers: list[Answer] = []
    kills: Kills | None = None
    for number, split in enumerate(wanted):
        most = max([2, *options.batches])
        flags = split.flags(options.draft_model, layers, options.window, most, options.streams)
        with serving(split, options.model, flags) as (url, pid):
            client = Client(url, split, options.tokens)
            warm_up(client, split, prompts)
            answers += by_turns(client, split, prompts)
            if number == 0:
                answers += more_of_first(options, client, split, prompts)
                asked = [prompt for of_task in prompts.values() for prompt in of_task]
                kills = kill_executors(url, pid, asked[:4], MIRROR, options.kills, options.tokens)
    results = Results(wanted, answers, layers, options.window)
    results.kills = kills
    return results


def warm_up(client: Client, split: Split, prompts: Prompts) -> None:
    """What is compiled or measured on first use."""
    task, [prompt, *_] = next(iter(prompts.items()))
    for row in (split.base, *split.rows):
        client.answer(row, task, 0, prompt, 0.0)


def more_of_first(
    options: argparse.Namespace, client: Client, split: Split, prompts: Prompts
) -> list[Answer]:
    """Batches, and sampling: AR, SD and Mirror."""
    rows = (AR, SD, MIRROR)
    made: list[Answer] = []
    for batch in options.batches:
        for task, of_task in prompts.items():
            if len(of_task) >= batch:
                for row in rows:
                    made += client.batch(row, task, of_task[:batch], 0.0)
    if not options.quick:
        sampled = Split(split.name, AR, (SD, MIRROR), split.target_cores, split.draft_cores)
        made += by_turns(client, sampled, prompts, temperature=1.0)
    return made


def note_pair(path: Path, target: str, draft: str) -> None:
    """Name the models beside the figures."""
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "target": target, "draft": draft}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
