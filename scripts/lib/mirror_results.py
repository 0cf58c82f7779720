"""What bench_mirror has seen: rates by row and task, ratios, figures."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean

from scripts.lib.mirror_rows import (
    AR,
    AR_BOTH,
    BOTH,
    EXITS,
    LOSSLESS,
    MIRROR,
    OWN,
    SD,
    SD_AUTO,
    SD_BOTH,
    SD_BOTH_AUTO,
    SD_RETRIEVAL,
    SD_STREAMING,
    Split,
    key_of,
)
from scripts.lib.mirror_runs import Answer
from scripts.lib.mirror_steps import Steps

TOPS = (1, 2, 4, 8, 16)
_BASES = (AR.name, AR_BOTH.name)


class Results:
    """The answers of a run.

    Args:
        splits: by name.
        layers: of the target.
        window: gamma.
        parts: figures that parts of the run have found by themselves.
    """

    def __init__(
        self,
        splits: Mapping[str, Split],
        answers: Sequence[Answer],
        layers: int,
        window: int,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        self.splits = splits
        self.answers = list(answers)
        self.window = window
        self._layers = layers
        self._parts = dict(parts or {})

    def alone(self, split: str, row: str, task: str | None = None) -> list[Answer]:
        """Greedy answers of a row of a split that ran by themselves, of all tasks or one."""
        return [
            a for a in self.answers
            if (a.split, a.row, a.batch, a.temperature) == (split, row, 1, 0.0)
            and (a.task == task or (task is None and a.task != LOSSLESS))
        ]  # fmt: skip

    def speedup(self, split: Split, row: str, task: str | None = None) -> float | None:
        """Tokens/s of a row by those of its split's base, the mean over tasks or of one task."""
        base = self.alone(split.name, split.base.name, task)
        return mean_ratio(self.alone(split.name, row, task), base)

    def mismatches(self) -> tuple[int, int]:
        """Greedy outputs that are not their server's base row's, and how many were compared.

        Those of a batch are compared with what the base row wrote in a batch of that size.
        """
        greedy = [a for a in self.answers if a.temperature == 0]
        expected = {_asked(a): a.token_ids for a in greedy if a.row in _BASES}
        others = [a for a in greedy if a.row not in _BASES and _asked(a) in expected]
        return sum(a.token_ids != expected[_asked(a)] for a in others), len(others)

    def figures(self) -> dict[str, float]:
        """By the names of issue 29."""
        wrong, compared = self.mismatches()
        made: dict[str, float | None] = {"mismatches": wrong, "outputs_compared": compared}
        lossless = {a.prompt for a in self.answers if (a.task, a.row) == (LOSSLESS, MIRROR.name)}
        made["prompts_compared"] = len(lossless) or None
        for split in self.splits.values():
            made |= self._of_split(split)
        made |= (
            self._of_loads()
            | self._speedups()
            | self._of_mirror()
            | self._of_drafting()
            | self._of_fallbacks()
        )
        made |= self._parts
        made["mirrored_retrieval_critical_ratio"] = _ratio(
            self._parts.get("mirrored_retrieval_critical_ms"),
            self._parts.get("unmirrored_retrieval_critical_ms"),
        )
        return {name: value for name, value in made.items() if value is not None}

    def fallbacks(self) -> dict[int, dict[int, float]]:
        """By exit layer and kappa: how often the outcome was not among the exit's candidates.

        Of the prompts that all exits have seen, so that depths differ in nothing else.
        """
        found = {name: self.alone(name, MIRROR.name) for name in EXITS if name in self.splits}
        found = {name: answers for name, answers in found.items() if answers}
        if not found:
            return {}
        common = set.intersection(*({(a.task, a.prompt) for a in of} for of in found.values()))
        shares = {}
        for name, answers in found.items():
            of_common = [a for a in answers if (a.task, a.prompt) in common]
            if of_common:
                layer = self._layers * self.splits[name].exit_part // 4
                steps = Steps.of(of_common)
                at = {top: steps.unforeseen(top) for top in TOPS}
                shares[layer] = {top: share for top, share in at.items() if share is not None}
        return dict(sorted(shares.items()))

    def _of_split(self, split: Split) -> dict[str, float | None]:
        """A row's own figures; of AR those of the split that Mirror is compared in."""
        made: dict[str, float | None] = {}
        for row in (split.base, *split.rows):
            answers = self.alone(split.name, row.name)
            if not answers or split.exit_part != 2 or (row is AR and split.name != OWN):
                continue
            steps = Steps.of(answers)
            made |= {
                f"tokens_s_{row.key}": rate(answers),
                f"accept_length_{row.key}": steps.accept_length,
                f"step_ms_{row.key}": steps.step_ms,
                f"speedup_{row.key}": self.speedup(split, row.name),
            }
        return made

    def loads(self) -> dict[tuple[str, str, int, float], list[Answer]]:
        """Answers by split, row, batch and temperature, without those of single greedy requests."""
        found: dict[tuple[str, str, int, float], list[Answer]] = {}
        for a in self.answers:
            if (a.batch > 1 or a.temperature) and a.task != LOSSLESS:
                found.setdefault((a.split, a.row, a.batch, a.temperature), []).append(a)
        return found

    def _of_loads(self) -> dict[str, float | None]:
        """Tokens/s of all requests of a batch together, and at T = 1."""
        return {
            f"tokens_s_{key_of(row)}" + (f"_batch{batch}" if batch > 1 else "_t1"):
            batch * rate(answers)
            for (_, row, batch, _), answers in self.loads().items()
        }  # fmt: skip

    def _speedups(self) -> dict[str, float | None]:
        mine = self.alone(OWN, MIRROR.name)
        against = {
            "ar": self.alone(OWN, AR.name),
            "vanilla": self.alone(OWN, SD.name),
            "vanilla_both": self.alone(BOTH, SD_BOTH.name),
            "sd_auto": self.alone(OWN, SD_AUTO.name),
            "sd_auto_both": self.alone(BOTH, SD_BOTH_AUTO.name),
        }
        made = {f"speedup_mirror_vs_{name}": mean_ratio(mine, of) for name, of in against.items()}
        return {**made, "tasks": len({a.task for a in mine})}

    def _of_mirror(self) -> dict[str, float | None]:
        """Of its steps: what was hidden, what was not there, and Eq. 10."""
        answers = self.alone(OWN, MIRROR.name)
        if not answers:
            return {}
        steps, fitting = Steps.of(answers), self._tasks_that_fit()
        hidden = [a for a in answers if a.task in fitting]
        serial = self._serial_draft_ms()
        return {
            "fallback_share": steps.fallback_share,
            "hidden_share": Steps.of(hidden).hidden_share if hidden else None,
            "hidden_share_all": steps.hidden_share,
            "tasks_where_drafting_fits": len(fitting),
            "suffix_ms": steps.suffix_ms,
            "serial_draft_ms": serial,
            "latency_law_error": _error(steps.law_ms, steps.step_ms),
            "latency_law_error_foretold": None
            if serial is None
            else _error(steps.foretold_ms(serial), steps.step_ms),
        }

    def _serial_draft_ms(self, task: str | None = None) -> float | None:
        """T_draft: what a step of ordinary speculative decoding waits for its draft."""
        answers = self.alone(OWN, SD.name, task)
        return Steps.of(answers).waited_ms if answers else None

    def _tasks_that_fit(self) -> set[str]:
        """Tasks in which Mirror's suffix is as long as drafting takes where it is not hidden."""
        found = set()
        for task in {a.task for a in self.alone(OWN, MIRROR.name)}:
            serial = self._serial_draft_ms(task)
            suffix = Steps.of(self.alone(OWN, MIRROR.name, task)).suffix_ms
            if serial is not None and serial <= suffix:
                found.add(task)
        return found

    def _of_drafting(self) -> dict[str, float | None]:
        passes = {
            kind: Steps.of(answers).passes_a_window(self.window)
            for kind, row in (("", SD), ("retrieval", SD_RETRIEVAL), ("streaming", SD_STREAMING))
            if (answers := self.alone(OWN, row.name))
        }
        made = {"draft_steps_per_window": passes.get("")}
        for kind in ("retrieval", "streaming"):
            made[f"draft_steps_per_window_{kind}"] = passes.get(kind)
            made[f"draft_steps_ratio_{kind}"] = _ratio(passes.get(kind), passes.get(""))
        return made

    def _of_fallbacks(self) -> dict[str, float | None]:
        found = self.fallbacks()
        made: dict[str, float | None] = {
            f"fallback_exit{layer}_kappa{kappa}": share
            for layer, shares in found.items()
            for kappa, share in shares.items()
        }
        made["fallback_rises"] = rises(found) if found else None
        return made


def rises(fallbacks: Mapping[int, Mapping[int, float]]) -> int:
    """How many times fallbacks (by layer, by kappa) do not fall, with kappa or with depth."""
    shares = list(fallbacks.values())
    lines = [list(of.values()) for of in shares]
    lines += [[of[top] for of in shares] for top in TOPS if all(top in of for of in shares)]
    found = 0
    for line in lines:
        found += sum(after > before for before, after in itertools.pairwise(line))
        found += len(line) > 1 and line[-1] >= line[0]
    return found


def rate(answers: Sequence[Answer]) -> float:
    """Tokens/s of a request, behind its first token."""
    seconds = sum(a.decode_seconds for a in answers)
    return sum(len(a.token_ids) - 1 for a in answers) / max(seconds, 1e-9)


def mean_ratio(mine: Sequence[Answer], others: Sequence[Answer]) -> float | None:
    """Tokens/s by those of others, the mean over tasks; of the prompts that both have answered."""
    ratios = []
    for task in sorted({a.task for a in mine}):
        prompts = [{a.prompt for a in of if a.task == task} for of in (mine, others)]
        common = prompts[0] & prompts[1]
        ours, theirs = (
            [a for a in of if a.task == task and a.prompt in common] for of in (mine, others)
        )
        if common and rate(theirs):
            ratios.append(rate(ours) / rate(theirs))
    return fmean(ratios) if ratios else None


def _asked(answer: Answer) -> tuple[str, str, int, int]:
    return answer.split, answer.task, answer.prompt, answer.batch


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _error(foretold: float | None, measured: float) -> float | None:
    return None if foretold is None else abs(foretold - measured) / measured
