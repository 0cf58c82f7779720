"""The planner of a server, from what its target and its options say."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import (
    get_device,
    get_observability,
    get_parallel,
    get_serving,
    get_spec,
)

from sglang_ext.budget.choice import knee
from sglang_ext.budget.cost_sweep import cost_model_of, costs_of
from sglang_ext.drafters import DrafterContext
from sglang_ext.models.tokenizers import fingerprint
from sglang_ext.options import Options
from sglang_ext.step.metrics import SpeculationMetrics
from sglang_ext.step.planner import DraftPlanner

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker


def planner_of(
    target: "TpModelWorker", options: Options, active: bool, widths: Sequence[int] | None
) -> DraftPlanner:
    """Make a server's planner: measures what passes cost, and loads the drafters.

    Args:
        target: SGLang's worker, its memory pools made.
        active: False on ranks that get their trees from rank 0, and on prefill servers.
        widths: that steps may have; None: any.
    """
    runner = target.model_runner
    config = runner.model_config
    context = DrafterContext(
        vocab_size=config.vocab_size,
        options=options,
        tokenizer_fingerprint=fingerprint(target.tokenizer),
        eos_token_ids=frozenset(config.hf_eos_token_id or ()),
        model_path=config.model_path,
        device=get_device().device,
    )
    costs = costs_of(runner, get_parallel().tp_size)
    return DraftPlanner(
        context,
        get_spec().speculative_num_draft_tokens,
        4 * runner.max_running_requests,
        cost_model_of(runner, costs),
        active=active,
        knee=knee(costs) if costs else None,
        metrics=_metrics() if active and get_observability().enable_metrics else None,
        widths=widths,
    )


def _metrics() -> SpeculationMetrics:
    labels = {"model_name": get_serving().served_model_name}
    if get_parallel().dp_rank is not None:
        labels["dp_rank"] = str(get_parallel().dp_rank)
    return SpeculationMetrics(labels)
