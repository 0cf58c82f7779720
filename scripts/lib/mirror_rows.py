"""What bench_mirror compares: rows, the servers that they run on, and tasks of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.lib.spec_bench import Prompt

TARGET, DRAFT = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"
KAPPA = 8
# Candidates that the exit names on these servers; requests of the rows follow KAPPA of them.
NAMED = 16
# Spec-Bench's six tasks, and code: MT-bench's questions are of eight kinds, one of them coding.
TASKS = {
    "translation": "translation", "summarization": "summarization", "qa": "qa",
    "math_reasoning": "math", "rag": "rag", "coding": "code",
}  # fmt: skip
REST = "mt-bench"
TASK_NAMES = (REST, *TASKS.values())
# What is asked in order to compare outputs alone; a task of its own.
LOSSLESS = "lossless"
# Servers: with both cores for each model in turn, and with one for each.
BOTH, OWN = "both", "lens"
# Those whose exits' depths are compared.
EXITS = ("exit1", OWN, "exit3")
# Requests at a time, of every server.
MOST_BATCH = 4


@dataclass(frozen=True)
class Row:
    """A way to decode.

    Attributes:
        name: in tables; `key` in figures.
        params: custom_params of its requests.
    """

    name: str
    params: dict[str, Any] = field(hash=False)

    @property
    def key(self) -> str:
        """The name as figures have it."""
        return key_of(self.name)

    @property
    def mirrors(self) -> bool:
        """Whether it drafts while the target verifies."""
        return bool(self.params.get("mirror", {}).get("exit"))


def key_of(name: str) -> str:
    """A row's name as figures have it."""
    return name.lower().replace(", ", "_").replace(" ", "_")


def _mirror(
    exit: bool, retrieval: bool, streams: bool = False, budget: str = "auto"
) -> dict[str, Any]:
    wanted = {"exit": exit, "retrieval": retrieval, "streams": streams, "kappa": KAPPA}
    return {"drafter": "mirror", "budget": budget, "mirror": wanted, "ingest": False}


def _vanilla(retrieval: bool = False, streams: bool = False) -> dict[str, Any]:
    """As published: each step waits for all of a window, and verifies it."""
    return _mirror(exit=False, retrieval=retrieval, streams=streams, budget="fixed")


AR = Row("AR", {"drafter": "none", "ingest": False})
AR_BOTH = Row("AR, both cores", AR.params)
SD = Row("SD", _vanilla())
SD_RETRIEVAL = Row("SD, retrieval", _vanilla(retrieval=True))
SD_STREAMING = Row("SD, streaming", _vanilla(streams=True))
SD_AUTO = Row("SD, auto", _mirror(exit=False, retrieval=True))
SD_BOTH = Row("SD, both cores", SD.params)
SD_BOTH_AUTO = Row("SD, auto, both cores", SD_AUTO.params)
SSSD = Row("SSSD", {"drafter": "sssd", "ingest": False})
HEAD = Row("Mirror head", _mirror(exit=True, retrieval=False))
HEAD_RETRIEVAL = Row("Mirror head, retrieval", _mirror(exit=True, retrieval=True))
HEAD_STREAMING = Row("Mirror head, streaming", _mirror(exit=True, retrieval=False, streams=True))
LENS = Row("Mirror lens", _mirror(exit=True, retrieval=False))
LENS_RETRIEVAL = Row("Mirror lens, retrieval", _mirror(exit=True, retrieval=True))
LENS_STREAMING = Row("Mirror lens, streaming", _mirror(exit=True, retrieval=False, streams=True))
# The row that speedups are told of.
MIRROR = LENS_RETRIEVAL


@dataclass(frozen=True)
class Split:
    """A server: how the machine's cores are divided, how the exit reads, and whose rows it answers.

    Attributes:
        name: what it is called.
        base: the row that its others are compared with, by turns on the same prompts.
        rows: the others.
        target_cores: of the target's process; the draft model has `draft_cores`.
        lens: `--mirror-lens`.
        exit_part: the exit's depth, of four quarters.
        drafts: False: plain SGLang.
    """

    name: str
    base: Row
    rows: tuple[Row, ...]
    target_cores: frozenset[int]
    draft_cores: frozenset[int]
    lens: str = "auto"
    exit_part: int = 2
    drafts: bool = True

    def flags(
        self,
        draft: str,
        layers: int,
        window: int,
        lens_seconds: float,
        streams: str = "",
        weights: str = "auto",
    ) -> list[str]:
        """Of `sglang-ext serve`.

        Args:
            draft: the draft model; `streams` the folder of its streams.
            layers: of the target.
            window: gamma.
            lens_seconds: most that a lens may take that is not kept yet.
            weights: of the draft model.
        """
        bounds = [
            "--max-running-requests", str(MOST_BATCH), "--max-total-tokens", "8192",
            "--enable-metrics",
        ]  # fmt: skip
        if not self.drafts:
            return bounds
        cores = ",".join(map(str, sorted(self.draft_cores)))
        return [
            "--speculative-algorithm", "SSSD", "--drafter", "mirror", "--drafters", "sssd",
            "--draft-model", draft, "--mirror-device", f"cpu:{cores}",
            "--mirror-weights", weights, "--mirror-window", str(window),
            "--mirror-kappa", str(NAMED),
            "--mirror-lens", self.lens, "--mirror-exit-layer", str(layers * self.exit_part // 4),
            "--mirror-lens-seconds", f"{lens_seconds:g}", "--mirror-cache-mb", "256", *bounds,
            *(["--mirror-streams", streams] if streams else []),
        ]  # fmt: skip


def splits(cores: Sequence[int], streaming: bool = False) -> dict[str, Split]:
    """The servers by name, on the first two cores of a machine, in the order of their use.

    Those with both cores come first: the lens that they fit is kept for the others.

    Args:
        cores: that this process may use, at least two.
        streaming: the draft model has streams.
    """
    sd, head, lens = (
        (row,) if streaming else () for row in (SD_STREAMING, HEAD_STREAMING, LENS_STREAMING)
    )
    target, draft = frozenset(cores[:1]), frozenset(cores[1:2])
    both = target | draft
    made = [
        Split(BOTH, AR_BOTH, (SD_BOTH, SD_BOTH_AUTO), both, both),
        Split("exit1", AR_BOTH, (MIRROR,), both, both, exit_part=1),
        Split("exit3", AR_BOTH, (MIRROR,), both, both, exit_part=3),
        Split(
            OWN,
            AR,
            (SD, SD_RETRIEVAL, *sd, SD_AUTO, SSSD, LENS, LENS_RETRIEVAL, *lens),
            target,
            draft,
        ),
        Split("head", AR, (HEAD, HEAD_RETRIEVAL, *head), target, draft, lens="head"),
        Split("plain", AR_BOTH, (), both, both, drafts=False),
    ]
    return {split.name: split for split in made}


def of_tasks(prompts: Sequence[Prompt], each: int, most_tokens: int) -> dict[str, list[Prompt]]:
    """Of every task the first `each` prompts of at most `most_tokens`.

    A task whose prompts are all longer has its shortest one; tasks without any are left out.
    """
    found: dict[str, list[Prompt]] = {task: [] for task in TASK_NAMES}
    for prompt in prompts:
        found[TASKS.get(prompt.category, REST)].append(prompt)
    chosen = {}
    for task, of_task in found.items():
        short = [prompt for prompt in of_task if len(prompt.input_ids) <= most_tokens]
        shortest = sorted(of_task, key=lambda prompt: len(prompt.input_ids))[:1]
        chosen[task] = short[:each] or shortest
    return {task: of_task for task, of_task in chosen.items() if of_task}
