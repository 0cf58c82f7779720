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
        return self.name.lower().replace(", ", "_").replace(" ", "_")

    @property
    def mirrors(self) -> bool:
        """Whether it drafts while the target verifies."""
        return bool(self.params.get("mirror", {}).get("exit"))


def _mirror(exit: bool, retrieval: bool, streams: bool = False) -> dict[str, Any]:
    wanted = {"exit": exit, "retrieval": retrieval, "streams": streams, "kappa": KAPPA}
    return {"drafter": "mirror", "budget": "fixed", "mirror": wanted, "ingest": False}


AR = Row("AR", {"drafter": "none", "ingest": False})
AR_BOTH = Row("AR, both cores", AR.params)
SD = Row("SD", _mirror(exit=False, retrieval=False))
SD_RETRIEVAL = Row("SD, retrieval", _mirror(exit=False, retrieval=True))
SD_STREAMING = Row("SD, streaming", _mirror(exit=False, retrieval=False, streams=True))
SD_BOTH = Row("SD, both cores", SD.params)
SSSD = Row("SSSD", {"drafter": "sssd", "ingest": False})
HEAD = Row("Mirror head", _mirror(exit=True, retrieval=False))
HEAD_RETRIEVAL = Row("Mirror head, retrieval", _mirror(exit=True, retrieval=True))
LENS = Row("Mirror lens", _mirror(exit=True, retrieval=False))
LENS_RETRIEVAL = Row("Mirror lens, retrieval", _mirror(exit=True, retrieval=True))
LENS_STREAMING = Row("Mirror lens, streaming", _mirror(exit=True, retrieval=False, streams=True))
# The row that speedups are told of.
MIRROR = LENS_RETRIEVAL


@dataclass(frozen=True)
class Split:
    """A server: how the machine's cores are divided, how the exit reads, and whose rows it answers.

    Attributes:
        name: what it is called in messages.
        base: the row that its others are compared with, by turns on the same prompts.
        rows: the others.
        target_cores: of the target's process; the draft model has `draft_cores`.
        lens: `--mirror-lens`.
        exit_part: the exit's depth, of four quarters.
    """

    name: str
    base: Row
    rows: tuple[Row, ...]
    target_cores: frozenset[int]
    draft_cores: frozenset[int]
    lens: str = "auto"
    exit_part: int = 2

    def flags(
        self, draft: str, layers: int, window: int, batch: int, streams: str = ""
    ) -> list[str]:
        """Of `sglang-ext serve`.

        Args:
            draft: the draft model; `streams` the folder of its streams.
            layers: of the target.
            window: gamma.
            batch: most requests at a time.
        """
        cores = ",".join(map(str, sorted(self.draft_cores)))
        return [
            "--speculative-algorithm", "SSSD", "--drafter", "mirror", "--drafters", "sssd",
            "--draft-model", draft, "--mirror-device", f"cpu:{cores}",
            "--mirror-window", str(window), "--mirror-kappa", str(NAMED),
            "--mirror-lens", self.lens, "--mirror-exit-layer", str(layers * self.exit_part // 4),
            "--max-running-requests", str(batch), "--max-total-tokens", "8192",
            "--enable-metrics", *(["--mirror-streams", streams] if streams else []),
        ]  # fmt: skip


def splits(cores: Sequence[int], quick: bool, streaming: bool = False) -> list[Split]:
    """The servers of a run, on the first two cores of a machine.

    Args:
        cores: that this process may use, at least two.
        quick: without the other depths.
        streaming: the draft model has streams.
    """
    streamed = (SD_STREAMING, LENS_STREAMING) if streaming else ()
    target, draft = frozenset(cores[:1]), frozenset(cores[1:2])
    both = target | draft
    made = [
        Split("lens", AR, (SD, SD_RETRIEVAL, SSSD, LENS, LENS_RETRIEVAL, *streamed), target, draft),
        Split("head", AR, (HEAD, HEAD_RETRIEVAL), target, draft, lens="head"),
        Split("both cores", AR_BOTH, (SD_BOTH,), both, both),
    ]
    depths = [
        Split(f"exit at {part}/4", AR, (LENS_RETRIEVAL,), target, draft, exit_part=part)
        for part in (1, 3)
    ]
    return made if quick else made + depths


def of_tasks(prompts: Sequence[Prompt], each: int) -> dict[str, list[Prompt]]:
    """The first `each` prompts of every task; tasks that have none are left out."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        of_task = found.setdefault(TASKS.get(prompt.category, REST), [])
        if len(of_task) < each:
            of_task.append(prompt)
    return found
