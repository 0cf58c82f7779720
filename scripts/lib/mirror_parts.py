"""The parts of bench_mirror's run, each short enough for a session that ends soon.

A part asks one server, or is a program of its own; what it has found is kept as it comes
(mirror_folder), so that a part that was ended goes on where it was.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.lib.mirror_distribution import Sampled, prompts_of
from scripts.lib.mirror_folder import PartResults
from scripts.lib.mirror_kills import kill_executors
from scripts.lib.mirror_rows import (
    AR,
    BOTH,
    LOSSLESS,
    MIRROR,
    MOST_BATCH,
    OWN,
    SD,
    TASK_NAMES,
    Row,
    Split,
)
from scripts.lib.mirror_runs import Client, Servers
from scripts.lib.spec_bench import Prompt

# Prompts that outputs are compared on, and of a part of them.
_COMPARED, _COMPARED_AT_ONCE = 100, 25
_KILL_PARTS = 2
_SAMPLES, _QUICK_SAMPLES = 200, 64  # of each of check_sampling's cases
# Tasks that the exits at other depths, batches and T = 1 are seen on.
_SOME_TASKS = ("mt-bench", "translation", "qa", "math", "code")


@dataclass(frozen=True)
class Run:
    """What parts are run with.

    Attributes:
        splits: servers by name.
        servers: has them started.
        prompts: by task.
        short: of all tasks, for comparing outputs and distributions.
        kills: of the executor, in all.
        batches: beside batch 1.
        quick: fewer of everything.
    """

    splits: Mapping[str, Split]
    servers: Servers
    prompts: Mapping[str, Sequence[Prompt]]
    short: Sequence[Prompt]
    kills: int
    batches: Sequence[int]
    quick: bool

    def client(self, split: str, fresh: bool = False) -> Client:
        """Of a split's server, which is started.

        Args:
            fresh: anew, though it may be up. Where in memory a target lies decides on its speed
                (plain steps of one server took 113 ms, of the next one 163): what is compared
                between servers is to be the mean over several starts.
        """
        if fresh:
            self.servers.stop()
        return self.servers.of(self.splits[split])


Do = Callable[[Run, PartResults], Mapping[str, float]]


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        name: it is chosen by.
        minutes: that it takes about, on two cores with the models of issue 29, the start of its
            server included.
        do: runs it, and gives its own figures.
        quick: whether a quick run has it.
    """

    name: str
    minutes: float
    do: Do
    quick: bool = False


def all_parts() -> list[Part]:
    """In an order in which servers change seldom; the lens that the first fits is kept."""
    quick = ("qa", "math", "code")
    long = {"summarization": 8, "rag": 12}  # more minutes, to read their prompts

    # Each begins a server anew, for a minute or two.
    def tasks(split: str, minutes: float, among: Sequence[str] = ()) -> list[Part]:
        first = {TASK_NAMES[0]: 12} if split == BOTH else {}  # it fits the lens
        return [
            Part(f"{split}-{task}", minutes + long.get(task, 0) + first.get(task, 0),
                 partial(_task, split, task), task in among)
            for task in TASK_NAMES
        ]  # fmt: skip

    compared = range(0, _COMPARED, _COMPARED_AT_ONCE)
    return [
        *tasks(BOTH, 6, quick[:1]),
        Part("exit1", 20, partial(_depth, "exit1")),
        Part("exit3", 20, partial(_depth, "exit3")),
        *tasks(OWN, 14, quick),
        Part("batches", 25, _batches),
        Part("sampled", 20, _sampled),
        *(
            Part(f"{LOSSLESS}{number}", 25, partial(_lossless, first))
            for number, first in enumerate(compared, 1)
        ),
        *(Part(f"kills{n}", 25, partial(_kills, n), n == 1) for n in range(1, _KILL_PARTS + 1)),
        *tasks("head", 10, quick[:1]),
        Part("distribution", 28, _distribution),
        Part("retrieval", 15, _retrieval, quick=True),
    ]


def asked_by_turns(
    client: Client,
    rows: Sequence[Row],
    prompts: Mapping[str, Sequence[Prompt]],
    kept: PartResults,
    temperature: float = 0.0,
    begin: int = 0,
) -> None:
    """Every prompt by all rows, which take turns at being first; what is kept is not asked for.

    Args:
        begin: the row that is the first one's turn.
    """
    total = len(rows) * sum(map(len, prompts.values()))
    for turn, (task, number, prompt) in enumerate(_each(prompts)):
        first = (begin + turn) % len(rows)
        for place, row in enumerate([*rows[first:], *rows[:first]], 1):
            if kept.has(row.name, task, number, 1, temperature):
                continue
            made = client.answer(row, task, number, prompt, temperature)
            kept.add(made)
            rate = (len(made.token_ids) - 1) / max(made.decode_seconds, 1e-9)
            done = f"{turn * len(rows) + place}/{total}"
            print(f"{done} {task} {number}: {row.name} {rate:.2f} tok/s", flush=True)


def _each(prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[tuple[str, int, Prompt]]:
    for task, of_task in prompts.items():
        for number, prompt in enumerate(of_task):
            yield task, number, prompt


def _task(split: str, task: str, run: Run, kept: PartResults) -> Mapping[str, float]:
    """All rows of a split on a task, on a server of its own."""
    client, rows = run.client(split, fresh=True), (run.splits[split].base, *run.splits[split].rows)
    client.warm_up(rows, run.short[0])
    prompts = run.prompts.get(task, ())
    begin = TASK_NAMES.index(task) * len(prompts)
    asked_by_turns(client, rows, {task: prompts}, kept, begin=begin)
    return {}


def _some(run: Run, each: int | None = None) -> dict[str, Sequence[Prompt]]:
    return {task: run.prompts[task][:each] for task in _SOME_TASKS if task in run.prompts}


def _depth(split: str, run: Run, kept: PartResults) -> Mapping[str, float]:
    """How often an exit at another depth foresees the outcome."""
    asked_by_turns(run.client(split), (MIRROR,), _some(run), kept)
    return {}


def _sampled(run: Run, kept: PartResults) -> Mapping[str, float]:
    """T = 1: one prompt of each task."""
    client, rows = run.client(OWN), (AR, SD, MIRROR)
    client.warm_up(rows, run.short[0])
    asked_by_turns(client, rows, _some(run, 1), kept, 1.0)
    return {}


def _batches(run: Run, kept: PartResults) -> Mapping[str, float]:
    """Requests of several tasks at a time."""
    client, rows = run.client(OWN), (AR, SD, MIRROR)
    client.warm_up(rows, run.short[0])
    mixed = [prompt for of_task in _some(run, 1).values() for prompt in of_task]
    for size in run.batches:
        for row in rows:
            _together(client, row, "mixed", 0, mixed[:size], kept)
    return {}


def _lossless(first: int, run: Run, kept: PartResults) -> Mapping[str, float]:
    """Outputs of Mirror and AR, four at a time, on prompts from the so-many-th on."""
    client = run.client(OWN)
    prompts = run.short[first : first + _COMPARED_AT_ONCE]
    for start in range(0, len(prompts), MOST_BATCH):
        for row in (AR, MIRROR):
            group = prompts[start : start + MOST_BATCH]
            _together(client, row, LOSSLESS, first + start, group, kept)
    return {}


def _together(
    client: Client,
    row: Row,
    task: str,
    first: int,
    prompts: Sequence[Prompt],
    kept: PartResults,
) -> None:
    size = len(prompts)
    if all(kept.has(row.name, task, first + i, size, 0.0) for i in range(size)):
        return
    made = client.batch(row, task, first, prompts, 0.0)
    kept.add(*made)
    rates = [(len(a.token_ids) - 1) / max(a.decode_seconds, 1e-9) for a in made]
    print(f"{task} {first}, {size} together: {row.name} {sum(rates):.2f} tok/s", flush=True)


def _kills(number: int, run: Run, kept: PartResults) -> Mapping[str, float]:
    """A share of the kills."""
    share = run.kills * number // _KILL_PARTS - run.kills * (number - 1) // _KILL_PARTS
    kills = run.kills if run.quick else share
    return kill_executors(run.client(OWN), run.short[:4], MIRROR, kills).figures()


def _distribution(run: Run, kept: PartResults) -> Mapping[str, float]:
    """T = 1 and its filters: what is written, by how often."""
    each = _QUICK_SAMPLES if run.quick else _SAMPLES
    plain = Sampled(run.client("plain"), prompts_of(run.short), each)
    return plain.figures(run.client(BOTH), MIRROR)


def _retrieval(run: Run, kept: PartResults) -> Mapping[str, float]:
    """Mirrored retrieval at batch 32, which has no server (scripts/bench_mirrored_retrieval)."""
    run.servers.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "scripts.bench_mirrored_retrieval", "--json", str(path)]
        code = subprocess.run([*command, *(["--quick"] if run.quick else [])]).returncode
        if not path.exists():
            raise RuntimeError(f"bench_mirrored_retrieval ended with exit status {code}")
        found = json.loads(path.read_text())["figures"]
    names = ("unmirrored_retrieval_critical_ms", "mirrored_retrieval_critical_ms")
    return {name: found[name] for name in (*names, "different_trees")}
