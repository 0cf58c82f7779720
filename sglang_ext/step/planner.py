"""The worker's drafting half: whose drafter proposes what, and how much of it is verified."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang_ext.budget.choice import choose_nodes, choose_width, warm_up
from sglang_ext.budget.cost_model import CostModel
from sglang_ext.budget.prefill_ration import PrefillRation
from sglang_ext.budget.rationing import DraftingRation
from sglang_ext.drafters import Bias, Drafter, DrafterContext, load_all, overrides
from sglang_ext.step import penalties, relaxed
from sglang_ext.step.asking import AskedDrafter
from sglang_ext.step.drafter_choice import CountedStep, DrafterChoice, arms_of
from sglang_ext.step.metrics import BudgetLog, SpeculationMetrics
from sglang_ext.step.request_table import RequestTable, RunningRequest
from sglang_ext.tree import PackedTrees, TokenTree, check_all

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req

    from datastores import Bigrams

_NO_PROBS = np.empty(0)


@dataclass
class _Read:
    """What a drafter does in a prefill.

    Attributes:
        requests: that it drafts for.
        seconds: that it takes.
        tokens: of its drafts, that the target said too.
    """

    requests: int
    seconds: float = 0.0
    tokens: int = 0


class DraftPlanner:
    """Asks the requests' drafters for trees and chooses how much of each is verified.

    Args:
        context: what the drafters are told of the server.
        max_width: most nodes a step verifies per request, the root included.
        max_requests: requests to follow at most before those that left are forgotten.
        cost: measured cost of forward passes; None: on ranks that plan nothing.
        active: False on the tensor-parallel ranks that get their trees from rank 0.
        knee: I_knee of the device in tokens (budget/choice.py); None: not known.
        metrics: where to report to; None: nowhere.
        widths: on a device that runs equally many nodes of every request, those that steps may
            have, 1 among them; None: any, and what is no node is left out.
        drafters: those to ask, by name; None: those that the options name are loaded.
    """

    def __init__(
        self,
        context: DrafterContext,
        max_width: int,
        max_requests: int,
        cost: CostModel | None,
        active: bool,
        knee: int | None = None,
        metrics: SpeculationMetrics | None = None,
        widths: Sequence[int] | None = None,
        drafters: Mapping[str, Drafter] | None = None,
    ):
        self._options = context.options
        self._vocab_size = context.vocab_size
        self._max_width = max_width
        self._widths = sorted(widths) if widths else None
        self._padded_batch: Callable[[int], int] = lambda bs: bs
        self._active = active
        self.cost = cost
        self.knee = context.options.budget_knee or knee
        self.metrics = metrics
        self._log = BudgetLog()
        rationed = cost is not None and context.options.budget == "auto"
        self._ration = DraftingRation() if rationed else None
        if rationed:
            warm_up()
        if active and context.device == "cpu" and context.options.relaxed_acceptance:
            relaxed.warm_up()
        self._look: tuple[bool, float] | None = None
        self._prefill_rations: dict[str, PrefillRation] = {}
        self._read: dict[str, _Read] = {}
        if drafters is None:
            drafters = load_all(context) if active else {}
        self.drafters = drafters
        self._asked = {name: AskedDrafter(name, drafter) for name, drafter in drafters.items()}
        self._biasing = any(drafter.biases for drafter in self._asked.values())
        self.choice = DrafterChoice(arms_of(context.options) if active else ())
        self._counted: CountedStep | None = None
        self.datastores = [d.datastore for d in drafters.values() if d.datastore is not None]
        self.requests = RequestTable(
            self._asked,
            context.options.loaded_drafters(),
            context.options.default_drafter,
            max_width - 1,
            max_requests,
            self.choice,
        )

    @property
    def wants_bigrams(self) -> bool:
        """Whether a drafter has `take_bigrams`."""
        return any(overrides(drafter, Drafter.take_bigrams) for drafter in self.drafters.values())

    @property
    def uses_early_exit(self) -> bool:
        """Whether a drafter is to be told of early exits."""
        return any(drafter.uses_exit for drafter in self._asked.values())

    @property
    def exit_depth(self) -> float:
        """How deep in the target the early exit is to be, for those drafters that are told of it.

        Half, where none is.
        """
        depths = [d.drafter.exit_depth for d in self._asked.values() if d.uses_exit]
        return min(depths, default=0.5)

    @property
    def learns_from_steps(self) -> bool:
        """Whether a drafter is told of verified nodes, which its next drafts may depend on."""
        return any(drafter.learns for drafter in self._asked.values())

    def take_bigrams(self, bigrams: "Bigrams") -> None:
        """Give the drafters the target's likeliest next tokens by token."""
        for drafter in self._asked.values():
            drafter.tell(drafter.drafter.take_bigrams, bigrams)

    def prefill(self, reqs: Sequence["Req"]) -> None:
        """The target is about to read these requests' prompts: drafters may do so too."""
        if not self._active:
            return
        start = time.perf_counter()
        self._read = {
            name: _Read(requests)
            for name, requests in self.requests.prefill(reqs, self._pays_in_prefill).items()
        }
        seconds = time.perf_counter() - start
        for read in self._read.values():
            read.seconds = seconds / len(self._read)
        if self._read and self.metrics is not None:
            self.metrics.note_step("draft_prefill", seconds)

    def _pays_in_prefill(self, drafter: AskedDrafter, requests: int) -> bool:
        if self.cost is None or self._ration is None or not self.cost.was_observed:
            return True
        others = self.requests.decoding
        alone = self.cost.cost(others) if others else 0.0
        ration = self._prefill_rations.setdefault(drafter.name, PrefillRation())
        return ration.allows(requests, self.cost.cost(others + requests) - alone)

    def arrive(self, req: "Req") -> None:
        """A request came whose prompt another server reads: what drafting needs is made now."""
        if not self._active:
            return
        start = time.perf_counter()
        if self.requests.arrive(req) and self.metrics is not None:
            self.metrics.note_step("draft_prefill", time.perf_counter() - start)

    def note_handed_over(self, running: Sequence[RunningRequest]) -> None:
        """Report of requests in their first step how long drafts had been possible before it."""
        for r in running:
            if r.ready_at is not None and self.metrics is not None:
                # When the scheduler saw that all KV was there.
                self.metrics.note_draft_lead(r.req.time_stats.wait_queue_entry_time - r.ready_at)
            r.ready_at = None

    def foresee(self, reqs: Sequence["Req"]) -> list[TokenTree]:
        """For each request that `prefill` was told of, a chain to be read behind its prompt."""
        chains = [TokenTree.empty()] * len(reqs)
        # A request that was retracted goes on behind its output; its drafter knows the prompt only.
        running = [None if req.output_ids else self.requests.prefilled(req) for req in reqs]
        start = time.perf_counter()
        for drafter in self._asked.values():
            if drafter.drafts_in_prefill:
                self._draft_in_prefill(drafter, running, chains)
        if self.metrics is not None and any(map(len, chains)):
            self.metrics.note_step("draft", time.perf_counter() - start)
        return chains

    def _draft_in_prefill(
        self,
        drafter: AskedDrafter,
        running: Sequence[RunningRequest | None],
        chains: list[TokenTree],
    ) -> None:
        rows = [
            (i, r)
            for i, r in enumerate(running)
            if r is not None and r.drafter is drafter and _depth(r) > 0
        ]
        if not rows:
            return
        start = time.perf_counter()
        proposed = drafter.ask(
            drafter.drafter.prefill_draft,
            [r.draft for _, r in rows],
            self._max_width - 1,
            default=None,
            check=lambda answer: self._check_trees(answer, len(rows)),
        )
        read = self._read.setdefault(drafter.name, _Read(len(rows)))
        read.seconds += time.perf_counter() - start
        if proposed is not None:
            for (i, r), chain in zip(rows, proposed, strict=True):
                chains[i] = chain.before(r.ends).clipped(_depth(r))

    def foreseen(
        self,
        reqs: Sequence["Req"],
        chains: Sequence[TokenTree],
        predicted: Sequence[Sequence[int]],
    ) -> None:
        """What the target said behind each request's prompt and after its chain's tokens."""
        for req, chain, said in zip(reqs, chains, predicted, strict=True):
            known = self.requests.prefilled(req)
            if known is not None and len(chain):
                self._tell_verified(known, chain, said)
                if known.drafter is not None and known.drafter.name in self._read:
                    self._read[known.drafter.name].tokens += _right(chain, said)
        for name, ration in self._prefill_rations.items():
            read = self._read.pop(name, None)
            if read is not None:
                ration.note(read.requests, read.seconds, read.tokens)

    def biases(self, running: Sequence[RunningRequest | None]) -> list[Bias | None]:
        """What each request's next tokens are biased to; None: nothing."""
        if not self._biasing:
            return [None] * len(running)
        return [None if r is None else self._bias(r) for r in running]

    def biases_in_prefill(self, reqs: Sequence["Req"]) -> list[Bias | None]:
        """As `biases`, for requests whose prompts (or retracted outputs) are being read."""
        return self.biases([self.requests.reading(req) for req in reqs])

    def _bias(self, running: RunningRequest) -> Bias | None:
        drafter = running.drafter
        if drafter is None or not drafter.biases:
            return None
        return drafter.ask(
            drafter.drafter.bias, running.draft, default=None, check=self._check_bias
        )

    def _check_bias(self, bias: Bias | None) -> None:
        if bias is not None:
            bias.check(self._vocab_size)

    def relaxed_in_prefill(self, reqs: Sequence["Req"]) -> list[RunningRequest | None]:
        """Those of requests whose prompts are being read that have a relaxed rule."""
        read = [self.requests.prefilled(req) for req in reqs]
        return [r if r is not None and r.relaxed is not None else None for r in read]

    def note_known(self, tokens: Sequence[int], seconds: float) -> None:
        """Each request of a step got so many tokens that were known before it."""
        if self.metrics is not None:
            self.metrics.note_step("known", seconds)
            for count in tokens:
                # The draft's tokens that were right, the first one included, and one more.
                self.metrics.note_accept_length(count + 1)

    def note_prefill(self, seconds: float, decoder_seconds: float) -> None:
        """The target's pass over prompts took `seconds`, its decoder (if it has one) its part."""
        if self.metrics is not None:
            self.metrics.note_step("prefill", seconds)
            self.metrics.note_step("prefill_decoder", decoder_seconds)

    def note_kept_states(self, seconds: float) -> None:
        """Keeping the states of a prefill's prompts took `seconds` of it."""
        if self.metrics is not None:
            self.metrics.note_step("draft_prefill", seconds)

    def finish(self, rid: str) -> None:
        """The request ended."""
        self.requests.finish(rid)
        self._write_metrics()

    def looks(self) -> bool:
        """Whether this step asks for drafts; to be called once for each decode step."""
        return self._active and (self._ration is None or self._ration.allows())

    def needs_host(self, reqs: Sequence["Req"], look: bool) -> bool:
        """Whether a step of these requests must know their tokens: to draft, bias or penalize.

        Args:
            look: whether the step asks for drafts.
        """
        return any(self._needs_host(req, look) for req in reqs)

    def _needs_host(self, req: "Req", look: bool) -> bool:
        known = self.requests.running(req)
        if known is None or penalties.is_penalized(req):
            return True
        drafter = known.drafter or known.lost
        if drafter is None:
            return False
        if drafter.biases:
            return True
        return known.max_nodes > 0 and (look or known.fixed_budget)

    def plan(
        self,
        running: Sequence[RunningRequest],
        look: bool = True,
        padded: bool = False,
        committed: Sequence[int] | None = None,
    ) -> tuple[list[TokenTree], int]:
        """Each request's tree, and the width to verify them at; width 1 is a plain step.

        Args:
            look: what `looks` said of this step.
            padded: the forward pass will run `width` nodes of every request.
            committed: how many tokens each request has got in this step already; with those it
                must not get more than the widest tree would give.
        """
        trees = [TokenTree.empty()] * len(running)
        width = 1
        if look or any(r.fixed_budget for r in running):
            start = time.perf_counter()
            asked_s: dict[int, float] = {}
            for drafter in self._asked.values():
                asked_s |= self._propose(drafter, running, trees)
            if committed is not None:
                rest = [self._max_width - 1 - n for n in committed]
                trees = [tree.clipped(n) for tree, n in zip(trees, rest, strict=True)]
            trees, width, saved_s = self._cut(running, trees, padded)
            seconds = time.perf_counter() - start
            if any(r.drafter is not None and not r.fixed_budget for r in running):
                self._look = any(map(len, trees)), saved_s
            if self._widths is None:
                self.note_look(seconds)
            if self.metrics is not None:
                self.metrics.note_drafting(seconds)
            self._count(running, asked_s, trees)
        self._report(running, trees)
        return trees, width

    def _count(
        self,
        running: Sequence[RunningRequest],
        asked_s: Mapping[int, float],
        trees: Sequence[TokenTree],
    ) -> None:
        """Measure this step of the requests whose drafters were chosen."""
        if not self.choice.arms:
            return
        read = float(sum(r.context for r in running))
        tallies = [r.tally for r in running]
        self._counted = self.choice.step(tallies, asked_s, [len(tree) for tree in trees], read)

    def take_counted(self) -> CountedStep | None:
        """What is to be measured of the step that was planned last, once; None: nothing."""
        counted, self._counted = self._counted, None
        return counted

    def note_look(self, seconds: float) -> None:
        """What this step looked for and found took `seconds`, during which the device waited.

        `plan` calls it on the host; with captured widths whoever launches the step does.
        """
        look, self._look = self._look, None
        if look is not None and self._ration is not None:
            self._ration.note_look(seconds, *look)

    def use_widths(self, widths: Sequence[int], padded_batch: Callable[[int], int]) -> None:
        """From now on steps have one of these widths: those whose graphs were captured."""
        self._widths, self._padded_batch = sorted(widths), padded_batch

    def reads(
        self, running: Sequence[RunningRequest], trees: Sequence[TokenTree] = (), width: int = 1
    ) -> float:
        """KV entries that attention reads in a step of these, as CostModel counts them.

        Args:
            trees: what is verified; none: it is a plain step.
            width: nodes that the pass runs of every request, where all run as many.
        """
        if self.cost is None:
            return 0.0
        read = float(sum(r.context for r in running))
        if self._widths is not None:
            return read * (1.0 + self.cost.node_reads * (width - 1))
        for r, tree in zip(running, trees, strict=False):
            read += self.cost.node_reads * r.context * len(tree)
        return read

    def note_step(
        self,
        tokens: int,
        seconds: float,
        read: float,
        verify: bool = False,
        counted: CountedStep | None = None,
        held_up: bool = False,
    ) -> None:
        """A forward pass over `tokens` tokens, and all that belongs to it, took `seconds`.

        Args:
            read: what `reads` says of it.
            verify: whether it verified drafts; else it was a plain step.
            counted: what `take_counted` gave of it.
            held_up: whether something else had its processors meanwhile.
        """
        if self.cost is not None:
            self.choice.took(counted, seconds, self.cost.cost(tokens, verify, read), self.cost)
        if self.metrics is not None:
            self.metrics.note_step("verify" if verify else "plain", seconds)
        if self.cost is not None:
            self.cost.observe(tokens, seconds, verify, read, held_up)
        if self._ration is not None:
            self._ration.note_step(seconds)

    def note_exit(self, before_s: float, answer_s: float) -> None:
        """A pass came to its early exit after `before_s` seconds, which took `answer_s`."""
        if self.metrics is not None:
            self.metrics.note_step("before_exit", before_s)
            self.metrics.note_step("early_exit", answer_s)

    def observe(
        self,
        running: Sequence[RunningRequest],
        trees: Sequence[TokenTree],
        packed: PackedTrees,
        accept_index: npt.NDArray[np.int32],
        predicted: npt.NDArray[np.int32] | None = None,
        counted: CountedStep | None = None,
    ) -> None:
        """Learn from a verify step: how far the drafters' probabilities can be trusted.

        Args:
            accept_index: int32[bs, width], see verify.Accepted.
            predicted: int32[bs, width], the target's token after every node; None: only those on
                the accepted paths were asked.
            counted: what `take_counted` gave of the step.
        """
        if self.cost is not None:
            self.choice.committed(counted, accept_index, self.cost)
        on_path = np.zeros(packed.tokens.shape, dtype=bool)
        on_path.reshape(-1)[accept_index[accept_index >= 0]] = True
        verified = [b for b, r in enumerate(running) if packed.sizes[b] > 1 and not r.finished]
        accepted = [on_path[b, 1 : packed.sizes[b]] for b in verified]
        for b, mask in zip(verified, accepted, strict=True):
            running[b].calibration.observe(trees[b].probs[: len(mask)], mask)
            self._log.note_accepted(int(mask.sum()))
            if predicted is not None:
                said = predicted[b, : packed.sizes[b]].tolist()
                self._tell_verified(running[b], trees[b], said)
        if self.metrics is not None and verified:
            self.metrics.note_verified([trees[b] for b in verified], accepted)

    def note_relaxed(self, marks: "torch.Tensor | None") -> None:
        """Relaxation accepted these of a step's tokens: bool[bs, n]; None: it was not asked for."""
        if self.metrics is not None and marks is not None:
            self.metrics.note_relaxed(int(marks.sum()))

    @staticmethod
    def _tell_verified(running: RunningRequest, tree: TokenTree, predicted: Sequence[int]) -> None:
        drafter = running.drafter
        if drafter is not None and drafter.learns:
            seen = tree.first(len(predicted) - 1)
            drafter.tell(drafter.drafter.verified, running.draft, seen, predicted)

    def _propose(
        self, drafter: AskedDrafter, running: Sequence[RunningRequest], trees: list[TokenTree]
    ) -> dict[int, float]:
        """Ask a drafter for its requests' trees; by row, the seconds of it that are theirs."""
        depths = {i: _depth(r) for i, r in enumerate(running) if r.drafter is drafter}
        rows = [i for i, depth in depths.items() if depth > 0]
        if not rows:
            return {}
        start = time.perf_counter()
        proposed = drafter.ask(
            drafter.drafter.propose,
            [running[i].draft for i in rows],
            self._max_width - 1,
            default=None,
            check=lambda answer: self._check_trees(answer, len(rows)),
        )
        if proposed is not None:
            for i, tree in zip(rows, proposed, strict=True):
                r = running[i]
                trees[i] = tree.before(r.ends).clipped(depths[i]).first(r.max_nodes)
        return dict.fromkeys(rows, (time.perf_counter() - start) / len(rows))

    def _check_trees(self, trees: Sequence[TokenTree], requests: int) -> None:
        if len(trees) != requests:
            raise ValueError(f"expected {requests} trees, got {len(trees)}")
        check_all(trees, self._vocab_size)

    def _cut(
        self, running: Sequence[RunningRequest], trees: Sequence[TokenTree], padded: bool
    ) -> tuple[list[TokenTree], int, float]:
        """The trees' nodes that pay for themselves, the width, and the seconds they should save."""
        most = self._max_width - 1
        if self.cost is None or self._ration is None:
            whole = [tree.first(most) for tree in trees]
            return whole, self._width_for(1 + max(map(len, whole))), 0.0
        probs = [
            request.calibration(tree.probs) if len(tree) and not request.fixed_budget else _NO_PROBS
            for request, tree in zip(running, trees, strict=True)
        ]
        contexts = [r.context for r in running]
        drafting_s, knee = self._ration.drafting_s, self._options.budget_knee
        if self._widths is None:
            choice = choose_nodes(
                probs, self.cost, contexts, drafting_s, padded=padded, most_tokens=knee
            )
        else:
            choice = choose_width(
                probs,
                self.cost,
                self._widths,
                contexts,
                drafting_s,
                padded_batch=self._padded_batch(len(running)),
                most_tokens=knee,
            )
        chosen = [
            tree.first(most if request.fixed_budget else int(n))
            for request, tree, n in zip(running, trees, choice.nodes, strict=True)
        ]
        return chosen, self._width_for(1 + max(map(len, chosen))), choice.saved_s

    def _width_for(self, nodes: int) -> int:
        """The least width that holds so many nodes of each request."""
        if self._widths is None:
            return nodes
        return next(width for width in self._widths if width >= nodes)

    def _write_metrics(self) -> None:
        if self.metrics is not None:
            for drafter in self._asked.values():
                self.metrics.set_counters(drafter.counters())
            self.metrics.write()

    def _report(self, running: Sequence[RunningRequest], trees: Sequence[TokenTree]) -> None:
        if not self._active:
            return
        sizes = [len(tree) for tree in trees]
        self._log.note_step(sizes, self.knee)
        if self.metrics is None:
            return
        self.metrics.note_width(1 + sum(sizes) / len(sizes))
        if self.metrics.gauges_due():
            if self.knee is not None:
                self.metrics.set_budget(self.knee, len(running))
            for datastore in self.datastores:
                self.metrics.set_datastore(datastore.info())
            self.metrics.set_choices(self.choice.counts, self.choice.gains)
            self._write_metrics()


def _right(chain: TokenTree, said: Sequence[int]) -> int:
    """How many tokens of a chain the target said too, one after the other."""
    count = 0
    for token, answer in zip(chain.tokens.tolist(), said, strict=False):
        if token != answer:
            break
        count += 1
    return count


def _depth(running: RunningRequest) -> int:
    """How deep a tree is of use: the bonus token needs a place too."""
    depth = min(running.remaining_tokens - 1, running.max_nodes)
    bound = penalties.max_depth(running.req, len(running.draft.output))
    return depth if bound is None else min(depth, bound)
