"""What bench_specdec compares: ways to decode a sentence, or one that grows, with their params."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

HIGH_QUALITY, HIGH_EFFICIENCY = (3, 1.0), (5, 3.0)
"""SpecDec++'s two settings of (top-beta, tau)."""
GRID = tuple((top_beta, tau) for top_beta in (3, 5) for tau in (1.0, 2.0, 3.0, 5.0))
PUBLISHED = (HIGH_QUALITY, HIGH_EFFICIENCY)
BLOCKS, QUICK_BLOCKS = (5, 10, 15, 20, 25), (5, 10)
ALONE = "NAT alone"


@dataclass(frozen=True)
class Rule:
    """A relaxed rule (docs/relaxed.md)."""

    top_beta: int
    tau: float
    by: str = "target"

    def __str__(self) -> str:
        judged = "" if self.by == "target" else " by drafter"
        return f"({self.top_beta}, {self.tau:g}){judged}"

    @property
    def figure(self) -> str:
        """Its part of a figure's name."""
        return f"beta{self.top_beta}_tau{self.tau:g}".replace(".", "_")


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        drafter: whose drafts are verified; "none": plain decoding, on the plain server; "auto":
            those that the server chooses.
        length: most nodes drafted a step, all of them verified; None: the server's budget.
        rule: what is accepted beside the target's own tokens; None: nothing, output is AT's.
        drafts_last: a sentence that grows drafts its last output (SSBD, without a bias).
        options: further custom_params.
        batched: measured at larger batches too.
    """

    name: str
    drafter: str = "none"
    length: int | None = None
    rule: Rule | None = None
    drafts_last: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    batched: bool = False

    @property
    def exact(self) -> bool:
        """Whether its output must be AT's."""
        return self.rule is None

    def params(self, last: Sequence[int]) -> dict[str, Any]:
        """custom_params of a request.

        Args:
            last: what the sentence's last update wrote; empty at first.
        """
        params: dict[str, Any] = {"ingest": False, **self.options}
        if self.drafter != "auto":
            params["drafter"] = self.drafter
        if self.length is not None:
            params |= {"budget": "fixed", "draft_length": self.length}
        if self.drafts_last:
            params["ssbd"] = {"draft": list(last), "beta": 0}
        if self.rule is not None:
            params["relaxed"] = {
                "top_beta": self.rule.top_beta, "tau": self.rule.tau, "by": self.rule.by,
            }  # fmt: skip
        return params


AT = Method("AT greedy", batched=True)
AUTO = Method("chosen (auto), budget auto", "auto", batched=True)
_BLOCK = {"specdec": {"retrieve": False}}
# As published: without branches.
_CHAIN = {"specdec": {"retrieve": False, "branches": 1}}
_BOTH = {"specdec": {"retrieve": True}}


def sentence_methods(drafters: Collection[str], length: int) -> list[Method]:
    """The methods that translate all sentences.

    Args:
        drafters: those that the server has loaded; rows of others are left out.
        length: most nodes drafted a step.
    """
    rules = [Rule(*pair) for pair in PUBLISHED]
    methods = [
        AT,
        Method("SSSD", "sssd", length, batched=True),
        Method("SSSD, budget auto", "sssd", batched=True),
    ]
    if "suffix" in drafters:
        methods.append(Method("suffix", "suffix", length, batched=True))
    methods += [_sssd(rule, length, batched=True) for rule in rules]
    if "specdec" in drafters:
        together = Method("SpecDec with SSSD", "specdec", length, options=_BOTH, batched=True)
        methods += [
            specdec(length, batched=True),
            specdec_chain(length),
            *(_specdecpp(rule, length, batched=True) for rule in rules),
            together,
            AUTO,
        ]
    return methods


def setting_methods(
    drafters: Collection[str],
    length: int,
    grid: Iterable[tuple[int, float]],
    blocks: Iterable[int],
    judged_by_drafter: bool,
) -> list[Method]:
    """The methods that only differ in a setting, on fewer sentences.

    Args:
        drafters: those that the server has loaded; rows of others are left out.
        length: most nodes drafted a step by relaxed methods.
        grid: (top-beta, tau) of relaxed rules.
        blocks: k of SpecDec's sweep.
        judged_by_drafter: whether specdec gives log-probabilities.
    """
    rules = [Rule(*pair) for pair in grid]
    methods = [AT, *(_sssd(rule, length) for rule in rules)]
    if "specdec" in drafters:
        if judged_by_drafter:
            rules += [Rule(*pair, "drafter") for pair in PUBLISHED]
        methods += [of(k) for k in sorted(set(blocks)) for of in (specdec, specdec_chain)]
        methods += [_specdecpp(rule, length) for rule in rules]
    return methods


def _sssd(rule: Rule, length: int, batched: bool = False) -> Method:
    return Method(f"SSSD relaxed {rule}", "sssd", length, rule, batched=batched)


def specdec(length: int, batched: bool = False) -> Method:
    """SpecDec of blocks of so many places, as many tokens verified: a server's branches."""
    return Method(f"SpecDec k={length}", "specdec", length, options=_BLOCK, batched=batched)


def specdec_chain(length: int) -> Method:
    """SpecDec as published, chains of so many tokens."""
    return Method(f"SpecDec k={length}, chain", "specdec", length, options=_CHAIN)


def _specdecpp(rule: Rule, length: int, batched: bool = False) -> Method:
    return Method(f"SpecDec++ {rule}", "specdec", length, rule, options=_BLOCK, batched=batched)


def growing_methods(length: int, grid: Iterable[tuple[int, float]]) -> list[Method]:
    """The methods that translate sentences which grow, anew after each step."""
    exact = Method("SSBD", "ssbd", length, drafts_last=True)
    rules = [Rule(*pair) for pair in grid]
    return [
        AT,
        exact,
        *(Method(f"SSBD relaxed {r}", "ssbd", length, r, drafts_last=True) for r in rules),
    ]
