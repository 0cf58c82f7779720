"""Drafts that are read along with the prompt: what is right of them is known before decoding.

A few tokens behind a short prompt cost little: where an encoder takes the time of a prefill, and
where most of the prompt is cached (a source that grew by some words). The request's first token is
the one that it always has; the tokens of the draft that the target confirmed are kept, with their
K and V, and make up the first decode step, which then needs no forward pass. The target's token
after every other one goes to the drafter as advice (Drafter.verified).

The pass is a verify pass behind what is cached: what is left of the prompt and the draft are one
chain. Our attention gives a token the same bits in either (cpu/attention_kernel.py). On a device it
is a longer prompt (cuda/prefill.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_ext.cpu.likeliest import likeliest_tokens
from sglang_ext.drafters import Bias
from sglang_ext.step.bias import BiasedRows, Expected, prefer_next_tokens
from sglang_ext.step.known_tokens import KnownTokens, right_tokens
from sglang_ext.step.ragged import needs_every_row
from sglang_ext.step.relaxed import Relaxation, relax
from sglang_ext.step.verify import prefer_greedily
from sglang_ext.tree import TokenTree

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult

    from sglang_ext.step.request_table import RunningRequest

# The pass makes a row of logits of every token: too dear for long prompts, whose own reading takes
# the time anyway.
_MOST_PROMPT_TOKENS = 128
# What the pass changes of a batch, put back behind it.
_CHANGED = (
    "forward_mode", "input_ids", "out_cache_loc", "seq_lens", "seq_lens_cpu", "seq_lens_sum",
    "spec_info",
)  # fmt: skip


@dataclass(frozen=True)
class PrefilledDrafts:
    """What a prefill with drafts gives.

    Attributes:
        result: SGLang's, as of a prefill without drafts: greedy tokens, a row of logits each.
        predicted: for each request, the target's token after its prompt, then after each token of
            its draft.
        known: for each request, what it will write; None where the draft was wrong at once.
    """

    result: "GenerationBatchResult"
    predicted: list[list[int]]
    known: list[KnownTokens | None]


def can_read_drafts(batch: "ScheduleBatch") -> bool:
    """Whether a prefill batch has room for drafts: prompts to their ends, few tokens, greedy."""
    return bool(
        batch.forward_mode == ForwardMode.EXTEND
        and batch.chunked_req is None
        and not needs_every_row(batch)
        and batch.input_ids is not None
        and len(batch.input_ids) == sum(batch.extend_lens) <= _MOST_PROMPT_TOKENS
    )


def prefill_plainly(
    target: "TpModelWorker",
    batch: "ScheduleBatch",
    biases: Sequence[Bias | None],
    pp_proxy_tensors: Any,
) -> "GenerationBatchResult":
    """Run the prefill of `batch` as SGLang does; `biases` hold for its requests' first tokens."""
    result = target.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)
    prefer_next_tokens(result, batch, Expected.of_next_tokens(biases))
    return result


@contextmanager
def put_back(batch: "ScheduleBatch", names: Sequence[str]) -> Iterator[None]:
    """What is set of these fields of a batch inside is undone at the end."""
    before = {name: getattr(batch, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)


def prefill_with_drafts(
    target: "TpModelWorker",
    allocator: Any,
    batch: "ScheduleBatch",
    chains: Sequence[TokenTree],
    biases: Sequence[Bias | None],
    running: "Sequence[RunningRequest | None]" = (),
) -> PrefilledDrafts | None:
    """Run the prefill of `batch` (see `can_read_drafts`) with a draft behind each prompt.

    Args:
        allocator: of the KV pool, pages of one token; what it lends is given back.
        chains: a chain of tokens for each request; may be empty.
        biases: of the tokens that each request will write.
        running: the requests, for their relaxed rules; None for one, or no list: it has none.

    Returns:
        None if the pool has no room for the drafts: nothing was run.
    """
    drafts = [chain.tokens.tolist() for chain in chains]
    slots = allocator.alloc(sum(map(len, drafts)))
    if slots is None:
        return None
    try:
        with put_back(batch, _CHANGED):
            _join(batch, drafts, slots)
            result = target.forward_batch_generation(batch, is_verify=True)
        logits = result.logits_output.next_token_logits
        lens = [len(draft) + 1 for draft in drafts]
        ends = np.cumsum(
            [p + n - 1 for p, n in zip(batch.extend_lens, lens, strict=True)], dtype=np.int64
        )
        said, taken = _decided(logits, chains, biases, running, ends - lens)
        predicted, marks = (
            [of[end - n : end].tolist() for end, n in zip(ends, lens, strict=True)]
            for of in (said, taken)
        )
        lent = slots.split([len(draft) for draft in drafts])
        pool = allocator.get_kvcache()
        known = [_known(*each, pool) for each in zip(drafts, predicted, lent, marks, strict=True)]
    finally:
        allocator.free(slots)
    roots = torch.from_numpy(ends - lens)
    result.logits_output.next_token_logits = logits[roots]
    result.next_token_ids = said[roots]
    return PrefilledDrafts(result, predicted, known)


def write_known(known: KnownTokens, pool: Any, slots: torch.Tensor) -> None:
    """Store the K and V of known tokens.

    Args:
        pool: SGLang's KV pool (MHATokenToKVPool).
        slots: int[n], n as in `known.kv`.
    """
    for layer, (k, v) in enumerate(known.kv):
        pool.k_buffer[layer][slots] = k
        pool.v_buffer[layer][slots] = v


def _decided(
    logits: torch.Tensor,
    chains: Sequence[TokenTree],
    biases: Sequence[Bias | None],
    running: "Sequence[RunningRequest | None]",
    roots: npt.NDArray[np.int64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[rows], the token that each row of logits goes on with by the requests' rules, and
    bool[rows], where relaxation has made it so."""
    said = likeliest_tokens(logits)
    taken = torch.zeros(len(said), dtype=torch.bool)
    biased = _biased_rows(biases, chains, roots, len(said))
    if biased is not None:
        prefer_greedily(said, logits, biased)
    relaxation = Relaxation.of_chains(running, chains, roots) if running else None
    if relaxation is not None:
        nodes = relaxation.nodes([torch.from_numpy(array) for array in relaxation.arrays()])
        taken = relax(said, logits, nodes)
    return said, taken


def _biased_rows(
    biases: Sequence[Bias | None],
    chains: Sequence[TokenTree],
    roots: npt.NDArray[np.int64],
    rows: int,
) -> BiasedRows | None:
    """The biased ones of a pass's `rows`; each prompt's last token is the root of its chain."""
    if not any(biases):
        return None
    expected = np.full((rows, 1), -1, dtype=np.int64)
    betas = np.zeros(rows, dtype=np.float32)
    for bias, chain, root in zip(biases, chains, roots.tolist(), strict=True):
        if bias is not None:
            end = root + len(chain) + 1
            expected[root:end, 0] = bias.at_nodes(chain)
            betas[root:end] = bias.beta
    return BiasedRows.of(Expected(expected, betas))


def _known(
    draft: Sequence[int],
    predicted: Sequence[int],
    slots: torch.Tensor,
    taken: Sequence[bool],
    pool: Any,
) -> KnownTokens | None:
    def kv(right: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        kept = slots[:right].long()
        return [(k[kept], v[kept]) for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]

    return right_tokens(draft, predicted, kv, taken)


def _join(batch: "ScheduleBatch", drafts: Sequence[Sequence[int]], slots: torch.Tensor) -> None:
    """Make `batch` a verify batch whose trees are the prompts with the drafts behind them."""
    prompts = batch.input_ids.split(list(batch.extend_lens))
    cached = batch.out_cache_loc.split(list(batch.extend_lens))
    lent = slots.to(batch.out_cache_loc.dtype).split([len(draft) for draft in drafts])
    lens = [p + len(d) for p, d in zip(batch.extend_lens, drafts, strict=True)]
    bs, width = len(lens), max(lens)
    chain = torch.tril(torch.ones(width, width, dtype=torch.bool))
    tokens, places = [], []
    for prompt, draft, slot, extra in zip(prompts, drafts, cached, lent, strict=True):
        tokens += [prompt, torch.tensor(draft, dtype=prompt.dtype)]
        places += [slot, extra]
    prefixes = torch.tensor(batch.prefix_lens, dtype=batch.seq_lens_cpu.dtype)
    positions = [p + torch.arange(n) for p, n in zip(batch.prefix_lens, lens, strict=True)]
    verify_input = NgramVerifyInput(
        custom_mask=chain.repeat(bs, 1).flatten(),
        positions=torch.cat(positions),
        draft_token_num=width,
    )
    # Read by cpu/attention.py: the nodes that are no padding.
    verify_input.nodes = np.concatenate([row * width + np.arange(n) for row, n in enumerate(lens)])
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.input_ids = torch.cat(tokens)
    batch.out_cache_loc = torch.cat(places)
    batch.seq_lens = prefixes.to(batch.seq_lens.dtype)
    batch.seq_lens_cpu = prefixes
    batch.seq_lens_sum = None
    batch.spec_info = verify_input
