"""Speculation in SGLang's Prometheus endpoint (`--enable-metrics`), and a log line now and then."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from datastores.origins import Origin
from sglang_ext.tree import TokenTree

if TYPE_CHECKING:
    from datastores import DatastoreInfo

logger = logging.getLogger(__name__)

PREFIX = "sglang_ext:"
# Bits of TokenTree.sources. A node that several sources proposed counts for each of them.
SOURCES = {int(origin): name.lower() for name, origin in Origin.__members__.items()}
_STEP_KINDS = {
    "plain": "Decode steps without drafts.",
    "verify": "Steps that verified drafts.",
    "draft": "Drafting for a batch.",
    "known": "Decode steps whose tokens the prefill had shown.",
    "before_exit": "Of passes with an early exit, from the step's start to the exit.",
    "early_exit": "Early exits: what the target is likely to say, computed and told to drafters.",
    "prefill": "The target's passes over prompts, its encoder included.",
    "prefill_decoder": "An encoder-decoder target's decoder in these passes, without the encoder's "
    "K and V.",
    "draft_prefill": "Drafters reading prompts (SpecASR: the draft's encoder; on a decode server "
    "all drafters).",
}
LOG_EVERY_S = 60.0
_GAUGES_EVERY_S = 1.0
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_LEADS = (-1.0, -0.1, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)


class _Sum:
    """A counter that is written now and then: a write to the file of its values takes 3 us."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter
        self._more = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to what is written next."""
        self._more += amount

    def write(self) -> None:
        """Write what has come since the last time."""
        if self._more:
            self._counter.inc(self._more)
            self._more = 0.0


class _Series:
    """Makes series of our names with a server's labels.

    Args:
        labels: put on every series.

    Attributes:
        sums: the counters that have to be written now and then.
    """

    def __init__(self, labels: Mapping[str, str]):
        self.labels = dict(labels)
        self.sums: list[_Sum] = []
        self._names = tuple(labels)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        """A histogram with these upper bounds."""
        from prometheus_client import Histogram

        made = Histogram(PREFIX + name, text, self._names, buckets=buckets)
        return made.labels(**self.labels)

    def counter(self, name: str, text: str) -> _Sum:
        """A counter; `_total` joins its name."""
        return self._sum(self._counter(name, text))

    def gauge(self, name: str, text: str) -> Any:
        """A gauge, of whichever process set it last."""
        return self.gauges(name, text).labels(**self.labels)

    def gauges(self, name: str, text: str, *more: str) -> Any:
        """Gauges by `more` labels, which are still to be given, beside those of the server."""
        from prometheus_client import Gauge

        names = (*self._names, *more)
        return Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent")

    def by_kind(self, name: str, text: str, kinds: Sequence[str]) -> dict[str, Any]:
        """A gauge for each kind."""
        made = self.gauges(name, text, "kind")
        return {kind: made.labels(**self.labels, kind=kind) for kind in kinds}

    def by_position(self, name: str, text: str) -> Callable[[int], _Sum]:
        """A counter for each position of a draft, which is there once it is asked for."""
        made = self._counter(name, text, "position")
        return cache(lambda position: self._sum(made, position=str(position)))

    def by_drafter(self, name: str, text: str) -> Callable[[str], _Sum]:
        """A counter for each drafter, which is there once it is asked for."""
        made = self._counter(name, text, "drafter")
        return cache(lambda drafter: self._sum(made, drafter=drafter))

    def by_source(self, name: str, text: str) -> dict[int, _Sum]:
        """A counter for each bit of SOURCES."""
        made = self._counter(name, text, "source")
        return {bit: self._sum(made, source=source) for bit, source in SOURCES.items()}

    def _sum(self, made: Any, **more: str) -> _Sum:
        self.sums.append(_Sum(made.labels(**self.labels, **more)))
        return self.sums[-1]

    def _counter(self, name: str, text: str, *more: str) -> Any:
        from prometheus_client import Counter as Count

        return Count(PREFIX + name, text, (*self._names, *more))


class SpeculationMetrics:
    """Prometheus metrics of one scheduler process.

    Make it after SGLang has set PROMETHEUS_MULTIPROC_DIR: prometheus_client chooses where its
    values live when it is imported. What is counted is in the endpoint after `write`.

    Args:
        labels: put on every series, as SGLang's own are (model_name, ...).
    """

    def __init__(self, labels: Mapping[str, str]):
        series = _Series(labels)
        self._sums = series.sums
        self._add_steps(series)
        self._add_budget(series)
        self._add_datastore(series)
        self._drafter = series.gauges("drafter", "What a drafter counts of its own.", "name")
        self._choices = series.by_drafter(
            "drafter_choices", "Requests that `--drafter auto` has chosen this drafter for."
        )
        self._choices_before: dict[str, int] = {}
        self._gains = series.gauges(
            "drafter_gain",
            "With `--drafter auto`: tokens that a drafter's requests commit in the time of a plain "
            "decode step, drafting included.",
            "drafter",
        )
        self._labels = dict(labels)
        self._gauges_at = 0.0

    def _add_steps(self, series: _Series) -> None:
        """What steps do: widths, accepted tokens and their sources, seconds by kind."""
        self._accept_length = series.histogram(
            "accept_length", "Tokens a request commits per verify step, bonus included.", _LENGTHS
        )
        self._verify_width = series.histogram(
            "verify_width",
            "Nodes verified per request in a step (s_q, mean, root included); 1: plain.",
            _LENGTHS,
        )
        self._retrieval = series.histogram(
            "retrieval_seconds", "Seconds of drafting for one batch.", _SECONDS
        )
        self._draft_lead = series.histogram(
            "draft_lead_seconds",
            "Seconds from a drafter being ready for a request to all of the request's KV being "
            "there from its prefill server; below 0: the KV waited.",
            _LEADS,
        )
        self._steps, self._seconds = (
            {kind: series.counter(kind + unit, text) for kind, text in _STEP_KINDS.items()}
            for unit in ("_steps", "_seconds")
        )
        self._proposed = series.by_source("proposed_tokens", "Drafted tokens that were verified.")
        self._accepted = series.by_source("accepted_tokens", "Drafted tokens that were accepted.")
        # By their sources, and whether they were accepted: what the next `write` tells.
        self._nodes: Counter[tuple[int, bool]] = Counter()
        self._relaxed = series.counter(
            "relaxed_tokens", "Drafted tokens that only a request's relaxed rule accepted."
        )
        self._add_as_vllm_names_them(series)

    def _add_as_vllm_names_them(self, series: _Series) -> None:
        """vLLM's series of speculation (v1/spec_decode/metrics.py), under our prefix."""
        self._drafts = series.counter("spec_decode_num_drafts", "Drafts that were verified.")
        self._draft_tokens = series.counter(
            "spec_decode_num_draft_tokens", "Their tokens, of all branches."
        )
        self._accepted_tokens = series.counter(
            "spec_decode_num_accepted_tokens", "Those that were accepted."
        )
        self._accepted_at = series.by_position(
            "spec_decode_num_accepted_tokens_per_pos", "Those at each depth of a draft, from 0."
        )

    def _add_budget(self, series: _Series) -> None:
        """What the budget goes by."""
        self._budget_cap = series.gauge(
            "budget_cap", "Nodes per request up to I_knee at this batch."
        )
        self._knee = series.gauge(
            "budget_knee_tokens", "I_knee: tokens of a step at the roofline's knee."
        )

    def _add_datastore(self, series: _Series) -> None:
        """The datastore's size and state."""
        self._tokens = series.by_kind("datastore_tokens", "Searchable tokens.", ("live", "static"))
        self._bytes = series.by_kind(
            "datastore_bytes", "All that is searchable; the folder.", ("index", "disk")
        )
        self._namespaces = series.gauge("datastore_namespaces", "Namespaces with served tokens.")
        self._ingest_lag = series.gauge(
            "datastore_ingest_lag_seconds", "Age of the oldest output that is not searchable yet."
        )
        self._dropped = series.counter(
            "datastore_dropped_documents", "Outputs that a full queue dropped."
        )
        self._dropped_before = 0
        self._failures = series.counter(
            "datastore_background_failures",
            "Attempts to write the datastore's files that failed; each is made again.",
        )
        self._failures_before = 0
        self._role = series.by_kind(
            "datastore_role",
            "1 for what this process is to the datastore: alone; or one of those that share its "
            "folder: the one that folds, or a member.",
            ("alone", "writer", "member"),
        )
        self._folded = series.counter(
            "datastore_folded_logs", "Logs that became sub-index files, in the process that folds."
        )
        self._folded_before = 0
        self._elections = series.counter(
            "datastore_elections", "How often this process took the place of a writer that ended."
        )
        self._elections_before = 0
        self._pending = series.gauge(
            "datastore_pending_deletions", "Deletions that some file has not followed yet."
        )

    def write(self) -> None:
        """Write what has been counted: once a second, and when a request ends."""
        for (source, accepted), count in self._nodes.items():
            for bit in SOURCES:
                if source & bit:
                    self._proposed[bit].inc(count)
                    self._accepted[bit].inc(count * accepted)
        self._nodes.clear()
        for each in self._sums:
            each.write()

    def gauges_due(self) -> bool:
        """Whether a second has passed since they were set."""
        now = time.monotonic()
        if now - self._gauges_at < _GAUGES_EVERY_S:
            return False
        self._gauges_at = now
        return True

    def set_budget(self, knee: int, batch: int) -> None:
        """I_knee and what it leaves for each of `batch` requests."""
        self._knee.set(knee)
        self._budget_cap.set(max(1, knee // batch))

    def set_datastore(self, info: "DatastoreInfo") -> None:
        """The datastore's size and state."""
        self._tokens["live"].set(sum(info.namespaces.values()))
        self._tokens["static"].set(sum(info.corpora.values()))
        self._bytes["index"].set(info.nbytes)
        self._bytes["disk"].set(info.disk_bytes)
        self._namespaces.set(len(info.namespaces))
        self._ingest_lag.set(info.ingest_lag)
        self._dropped.inc(max(0, info.dropped_documents - self._dropped_before))
        self._dropped_before = info.dropped_documents
        self._failures.inc(max(0, info.background_failures - self._failures_before))
        self._failures_before = info.background_failures
        self._pending.set(info.pending_deletions)
        for role, gauge in self._role.items():
            gauge.set(role == info.role)
        self._folded.inc(max(0, info.folded_logs - self._folded_before))
        self._folded_before = info.folded_logs
        self._elections.inc(max(0, info.elections - self._elections_before))
        self._elections_before = info.elections

    def set_choices(self, counts: Mapping[str, int], gains: Mapping[str, float]) -> None:
        """Requests by the drafter that was chosen for them, and what each drafter gains."""
        for drafter, count in counts.items():
            self._choices(drafter).inc(count - self._choices_before.get(drafter, 0))
        self._choices_before = dict(counts)
        for drafter, gain in gains.items():
            self._gains.labels(**self._labels, drafter=drafter).set(gain)

    def note_drafting(self, seconds: float) -> None:
        """A batch was drafted for."""
        self._retrieval.observe(seconds)
        self.note_step("draft", seconds)

    def note_draft_lead(self, seconds: float) -> None:
        """A request's drafter was ready so long before its KV was there."""
        self._draft_lead.observe(seconds)

    def note_step(self, kind: str, seconds: float) -> None:
        """A step's part, one of _STEP_KINDS, took `seconds`."""
        self._steps[kind].inc()
        self._seconds[kind].inc(seconds)

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """A drafter's own totals, by name."""
        for name, value in counters.items():
            self._drafter.labels(**self._labels, name=name).set(value)

    def note_accept_length(self, tokens: int) -> None:
        """A draft gave a request so many tokens, the bonus included."""
        self._accept_length.observe(tokens)

    def note_relaxed(self, tokens: int) -> None:
        """So many drafted tokens were accepted by relaxation."""
        self._relaxed.inc(tokens)

    def note_width(self, width: float) -> None:
        """A step verifies so many nodes per request in the mean, roots included."""
        self._verify_width.observe(width)

    def note_verified(
        self, trees: Sequence[TokenTree], accepted: Sequence[npt.NDArray[np.bool_]]
    ) -> None:
        """The requests' nodes were verified.

        Args:
            accepted: for each tree, bool[n] for its first n nodes, those that were verified.
        """
        lengths = [int(mask.sum()) for mask in accepted]
        self._note_drafts(sum(map(len, accepted)), lengths)
        for tree, mask, length in zip(trees, accepted, lengths, strict=True):
            self._accept_length.observe(1 + length)
            if tree.sources is not None:
                sources = tree.sources[: len(mask)].tolist()
                self._nodes.update(zip(sources, mask.tolist(), strict=True))

    def _note_drafts(self, tokens: int, lengths: Sequence[int]) -> None:
        """Drafts of so many tokens were verified, of each of which a path so long was accepted."""
        self._drafts.inc(len(lengths))
        self._draft_tokens.inc(tokens)
        self._accepted_tokens.inc(sum(lengths))
        for depth in range(max(lengths, default=0)):
            self._accepted_at(depth).inc(sum(length > depth for length in lengths))


class BudgetLog:
    """A line in SGLang's log every LOG_EVERY_S seconds of work: what the budget chose."""

    def __init__(self) -> None:
        self._reset()

    def note_step(self, sizes: Sequence[int], knee: int | None) -> None:
        """A step verifies so many drafted nodes for each request."""
        nodes = sum(sizes)
        self._steps += 1
        self._plain += nodes == 0
        self._requests += len(sizes)
        self._nodes += nodes
        if time.monotonic() - self._since >= LOG_EVERY_S:
            self._write(knee)
            self._reset()

    def note_accepted(self, tokens: int) -> None:
        """A verified request committed `tokens` drafted tokens besides the bonus."""
        self._verified += 1
        self._accepted += tokens

    def _reset(self) -> None:
        self._since = time.monotonic()
        self._steps = self._plain = self._requests = self._nodes = 0
        self._verified = self._accepted = 0

    def _write(self, knee: int | None) -> None:
        logger.info(
            "sglang-ext budget: %d steps, mean batch %.1f, s_q %.2f (%.0f%% of steps plain), "
            "accept length %.2f where verified, I_knee %s",
            self._steps,
            self._requests / self._steps,
            1 + self._nodes / self._requests,
            100 * self._plain / self._steps,
            1 + self._accepted / max(1, self._verified),
            "not measured" if knee is None else knee,
        )
