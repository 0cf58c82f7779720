"""Host time between two verify steps on a device: what a GPU stands idle for, without retrieval.

From the last step's tokens being there to the next pass being launched: who has written what
(relay.py, request_table.py), checking and cutting the trees, the choice of a width, packing,
staging.
"""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from scripts.emulation.overlap_loop import LateCopy
from sglang_ext.budget.cost_model import CostModel
from sglang_ext.cuda.staging import mask_starts, to_device
from sglang_ext.cuda.widths import default_widths
from sglang_ext.drafters import Drafter, DrafterContext
from sglang_ext.options import Options
from sglang_ext.step.planner import DraftPlanner
from sglang_ext.step.relay import LastStep
from sglang_ext.step.step_result import StepResult
from sglang_ext.tree import TokenTree, pack

_WIDTH, _VOCAB, _PROMPT, _PER_STEP = 16, 128_256, 500, 3
# An H100's linear layers, Llama-3-8B in bf16 (docs/budget.md): only the choice depends on it.
_COSTS = {1: 5.4e-3, 256: 5.6e-3, 1024: 23.5e-3}


class _Ready(Drafter):
    """A drafter whose trees are there already: retrieval is measured elsewhere."""

    def __init__(self, trees: list[TokenTree]) -> None:
        self._trees = trees

    def propose(self, requests: Any, max_nodes: int) -> list[TokenTree]:
        """A tree for each."""
        return self._trees


def step_host_ms(batch: int, steps: int = 50) -> float:
    """Median host milliseconds of a step of `batch` requests with 15 drafted nodes each.

    CPU time of the one thread that does it: on a machine that does nothing else, wall time.
    The buffer is copied within the host's memory instead of to a device; the two kernels' launches
    for the mask are left out, and so is what SGLang's forward pass does on the host.
    """
    rng = np.random.default_rng(0)
    trees = [_tree(rng, _WIDTH - 1) for _ in range(batch)]
    planner = DraftPlanner(
        DrafterContext(vocab_size=_VOCAB, options=Options(drafter="ready")),
        _WIDTH,
        4 * batch,
        CostModel(_COSTS),
        active=True,
        widths=default_widths(_WIDTH),
        drafters={"ready": _Ready(trees)},
    )
    reqs = [_request(str(i)) for i in range(batch)]
    planner.requests.update(reqs, [[] for _ in reqs])
    last, lens = LastStep(), torch.full((batch,), _PROMPT, dtype=torch.int64)
    seconds = []
    for _ in range(steps):
        last.launched(reqs, _result(rng, batch))
        lens = lens + _PER_STEP
        served = SimpleNamespace(reqs=reqs, seq_lens_cpu=lens, encoder_lens_cpu=None)
        start = time.thread_time()
        pending = last.lacking(served)  # type: ignore[arg-type]
        running = planner.requests.update(reqs, pending)
        drafts, _ = planner.plan(running, planner.looks())
        planner.note_look(1e-4)
        planner.biases(running)
        packed = pack([r.draft.output[-1] for r in running], drafts, _WIDTH)
        now = lens.numpy()
        to_device(
            [
                packed.tokens.reshape(-1),
                (now[:, None] + packed.depths).reshape(-1),
                packed.next_token,
                packed.next_sibling,
                packed.mask,
                mask_starts(now, _WIDTH),
            ],
            "cpu",
        )
        seconds.append(time.thread_time() - start)
        for req, row in zip(reqs, pending, strict=True):
            req.output_ids += row
    return 1e3 * float(np.median(seconds[1:]))


def _result(rng: np.random.Generator, batch: int) -> StepResult:
    tokens = torch.from_numpy(rng.integers(0, _VOCAB, (batch, _WIDTH)))
    result = StepResult(
        next_token_ids=tokens.flatten(),
        accept_lens=torch.full((batch,), _PER_STEP, dtype=torch.int32),
        speculative_output_stride=_WIDTH,
    )
    result.copy_done = LateCopy(result)  # type: ignore[assignment]
    return result


def _request(rid: str) -> Any:
    params = SimpleNamespace(
        max_new_tokens=1 << 20, min_new_tokens=0, custom_params=None,
        frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0,
        ignore_eos=False, stop_token_ids=None,
    )  # fmt: skip
    prompt = list(range(_PROMPT))
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=prompt,
        origin_input_ids_unpadded=prompt,
        output_ids=[1],
        eos_token_ids=None,
        tokenizer=None,
        sampling_params=params,
    )


def _tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    parents = np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int32)
    probs = np.sort(rng.random(nodes).astype(np.float32))[::-1]
    return TokenTree(rng.integers(0, _VOCAB, nodes), parents, probs.copy())
