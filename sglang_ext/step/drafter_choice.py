"""`--drafter auto`: each request is drafted for in the way that pays on its namespace's traffic.

What a way gains is measured: tokens that steps committed by the time that they took, in steps of
plain decoding, so that 2 is twice as fast. Counted are the steps in which the drafter was asked,
their tokens and their time, with drafting and what the drafter took to read the prompt.

Only drafters are chosen that change nothing of what is written, and only for requests that leave
drafting to the server: none that names a drafter, and none with a relaxed rule, whose output
depends on what is drafted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.budget.bandit import GainBandit
from sglang_ext.budget.cost_model import CostModel
from sglang_ext.drafters.predicted_text import TOKENS_KEY
from sglang_ext.options import Options
from sglang_ext.request_options import RequestOptions

# A long request reports each time that it has taken so many plain steps.
_REPORTED_STEPS = 64.0
# A step that takes so many times what is expected was held up by something else.
_DELAYED = 2.0


@dataclass(frozen=True)
class Arm:
    """A way to draft.

    Attributes:
        name: what metrics and answers call it.
        drafter: who is asked.
        retrieve: whether SSSD drafts beside it; None: the drafter's own rule.
    """

    name: str
    drafter: str
    retrieve: bool | None = None


SSSD = Arm("sssd", "sssd")
SPECDEC = Arm("specdec", "specdec", retrieve=False)
TOGETHER = Arm("specdec+sssd", "specdec", retrieve=True)


def arms_of(options: Options) -> tuple[Arm, ...]:
    """The ways to draft that a server chooses among; none without `--drafter auto`."""
    if not options.chooses_drafters:
        return ()
    name = options.default_drafter
    return (SSSD, SPECDEC, TOGETHER) if name == "specdec" else (Arm(name, name),)


@dataclass
class Tally:
    """What one request's drafts have gained since it reported last.

    Attributes:
        tokens: committed in the steps that are counted.
        steps: what these took, in steps of plain decoding.
        owed_s: seconds that its drafter took besides, which the next step that is counted pays.
        ended: the request has left; steps that end later are not counted for it.
    """

    namespace: str
    arm: Arm
    tokens: float = 0.0
    steps: float = 0.0
    owed_s: float = 0.0
    ended: bool = False


@dataclass
class CountedStep:
    """A decode step in which requests were drafted for by choice, until all is known of it.

    Attributes:
        rows: the batch's rows of these requests.
        tallies: theirs.
        drafting_s: float64[rows], seconds of their drafters, each request's part.
        nodes: float64[batch], drafted nodes that are verified of every request of the batch.
        read: KV entries that a plain step's attention would read.
        tokens: int64[rows], what they committed; None: not known yet.
        seconds: of the pass and what belongs to it; None: not known yet.
        expected_s: the same, as the cost model expects it.
    """

    rows: list[int]
    tallies: list[Tally]
    drafting_s: npt.NDArray[np.float64]
    nodes: npt.NDArray[np.float64]
    read: float
    tokens: npt.NDArray[np.int64] | None = None
    seconds: float | None = None
    expected_s: float = 0.0

    def plain_steps(self, cost: CostModel) -> npt.NDArray[np.float64]:
        """float64[rows], what each request's part of the step took, in plain steps.

        All share what a plain step takes; what verifying takes beyond it is theirs by their nodes.
        """
        assert self.seconds is not None
        bs = len(self.nodes)
        plain_s = cost.cost(bs, read=self.read)
        seconds = min(self.seconds, _DELAYED * self.expected_s)
        drafted = self.nodes.sum()
        part = self.nodes[self.rows] / drafted if drafted else 1.0 / bs
        own = min(seconds, plain_s) / bs + max(0.0, seconds - plain_s) * part + self.drafting_s
        return np.asarray(own * bs / plain_s)


@dataclass
class DrafterChoice:
    """Chooses requests' drafters, and measures what they gain.

    Args:
        arms: the ways to draft; none: nothing is chosen.
    """

    arms: Sequence[Arm]
    counts: dict[str, int] = field(default_factory=dict)
    """Requests by the name of the arm that was chosen for them."""

    def __post_init__(self) -> None:
        self._by_name = {arm.name: arm for arm in self.arms}
        self._bandit = GainBandit(list(self._by_name))

    @property
    def gains(self) -> Mapping[str, float]:
        """Tokens by plain step of each arm that was tried, in all namespaces."""
        return self._bandit.gains()

    def choose(self, options: RequestOptions, params: Mapping[str, Any]) -> Tally | None:
        """Choose for a request; None: it does not leave that to the server.

        Args:
            params: its custom_params.
        """
        decided = options.drafter, options.draft_length, options.budget, options.relaxed
        if any(given is not None for given in decided) or TOKENS_KEY in params:
            return None
        among = [arm.name for arm in self.arms if _agrees(arm, params)]
        if not among:
            return None
        name = self._bandit.choose(options.namespace, among)
        self.counts[name] = self.counts.get(name, 0) + 1
        return Tally(options.namespace, self._by_name[name])

    @staticmethod
    def charge(tallies: Sequence[Tally | None], seconds: float) -> None:
        """The drafter of these requests took so long to read their prompts, all together."""
        for tally in tallies:
            if tally is not None:
                tally.owed_s += seconds / len(tallies)

    @staticmethod
    def step(
        tallies: Sequence[Tally | None],
        asked_s: Mapping[int, float],
        nodes: Sequence[int],
        read: float,
    ) -> CountedStep | None:
        """A step is about to run; None: nothing of it is counted.

        Args:
            tallies: of the batch's requests.
            asked_s: for each row whose drafter was asked, the seconds that this took for it.
            nodes: that are verified of each row's tree.
            read: KV entries that a plain step's attention would read.
        """
        counted = {row: tally for row in asked_s if (tally := tallies[row]) is not None}
        if not counted:
            return None
        rows = list(counted)
        drafting_s = np.array([asked_s[row] for row in rows])
        made = CountedStep(
            rows, list(counted.values()), drafting_s, np.array(nodes, dtype=np.float64), read
        )
        if not any(nodes):
            made.tokens = np.ones(len(rows), dtype=np.int64)
        return made

    def committed(
        self, step: CountedStep | None, index: npt.NDArray[np.int32], cost: CostModel
    ) -> None:
        """A verify step has accepted these nodes: int32[batch, width], -1 for none."""
        if step is not None:
            step.tokens = (index[step.rows] >= 0).sum(axis=1)
            self._settle(step, cost)

    def took(
        self, step: CountedStep | None, seconds: float, expected_s: float, cost: CostModel
    ) -> None:
        """A step's pass, and what belongs to it, took `seconds`."""
        if step is not None:
            step.seconds, step.expected_s = seconds, expected_s
            self._settle(step, cost)

    def finish(self, tally: Tally) -> None:
        """Its request ended."""
        self._report(tally)
        tally.ended = True

    def _report(self, tally: Tally) -> None:
        if tally.steps > 0.0:
            self._bandit.report(tally.namespace, tally.arm.name, tally.tokens, tally.steps)
            tally.tokens = tally.steps = 0.0

    def _settle(self, step: CountedStep, cost: CostModel) -> None:
        if step.tokens is None or step.seconds is None:
            return
        plain_s = cost.cost(len(step.nodes), read=step.read) / len(step.nodes)
        taken = step.plain_steps(cost)
        for tally, tokens, steps in zip(step.tallies, step.tokens, taken, strict=True):
            if tally.ended:
                continue
            tally.tokens += float(tokens)
            tally.steps += float(steps) + tally.owed_s / plain_s
            tally.owed_s = 0.0
            if tally.steps >= _REPORTED_STEPS:
                self._report(tally)


def _agrees(arm: Arm, params: Mapping[str, Any]) -> bool:
    """Whether an arm does what a request says of SpecDec's retrieval."""
    given = params.get("specdec")
    said = given.get("retrieve") if isinstance(given, Mapping) else None
    return said is None or arm.drafter != "specdec" or arm.retrieve == said
