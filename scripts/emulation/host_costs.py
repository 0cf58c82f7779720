"""Host time per step of what the CUDA path does on the host, measured without a GPU."""

import argparse
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from sglang_ext.cuda.staging import to_device
from sglang_ext.step import penalties
from sglang_ext.step.penalties import DevicePenalties
from sglang_ext.tree import TokenTree, pack

_WIDTH = 16
_OUTPUT = 500  # tokens that each request has written before the first step
_PER_STEP = 3  # tokens that each step commits


def penalty_host_ms(batch: int, vocab: int, steps: int = 50) -> float:
    """Median host milliseconds per step of `DevicePenalties.apply_tree`, CPU time of its thread.

    Every request has all penalties, 500 tokens (of 2,000 different ones) written before the first
    step and 3 more in each, and a random tree of 16 nodes. All that the host computes and stages
    is of full size. The kernels are the CPU's, on the first request's data alone: each call is
    made and dispatched as on CUDA, where the host queues a kernel instead of running that small
    one. Not contained: what a launch costs more than such a call (microseconds, for about 25
    kernels), and pinned memory.

    Args:
        batch: requests.
        vocab: the target's vocabulary.
        steps: measured ones; the first, in which the outputs so far are counted, is not.
    """
    rng = np.random.default_rng(0)
    reqs: list[Any] = [_request(str(i)) for i in range(batch)]
    words = min(2000, vocab)
    outputs = [rng.integers(0, words, _OUTPUT).tolist() for _ in reqs]
    logits = torch.empty(batch * _WIDTH, vocab)  # of which hardly a page is ever touched
    kept = DevicePenalties(vocab, "cpu", batch)
    seconds = []
    for _ in range(steps + 1):
        drafts = [_tree(rng, words) for _ in reqs]
        trees = pack([output[-1] for output in outputs], drafts, _WIDTH)
        with mock.patch.object(penalties, "to_device", _staged):
            start = time.thread_time()
            kept.apply_tree(logits, reqs, outputs, trees)
            seconds.append(time.thread_time() - start)
        for output in outputs:
            output.extend(rng.integers(0, words, _PER_STEP).tolist())
    return 1e3 * float(np.median(seconds[1:]))


def _staged(arrays: Sequence[np.ndarray], device: Any) -> list[torch.Tensor]:
    """All arrays in one buffer, as for a device; of each tensor, its first entry."""
    return [tensor[:1] for tensor in to_device(arrays, device)]


def _request(rid: str) -> Any:
    params = SimpleNamespace(
        frequency_penalty=0.2, presence_penalty=0.1, repetition_penalty=1.05,
        min_new_tokens=0, stop_token_ids=None,
    )  # fmt: skip
    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    return SimpleNamespace(rid=rid, sampling_params=params, eos_token_ids={2}, tokenizer=tokenizer)


def _tree(rng: np.random.Generator, words: int) -> TokenTree:
    n = _WIDTH - 1
    parents = np.array([rng.integers(-1, i) for i in range(n)], dtype=np.int32)
    return TokenTree(rng.integers(0, words, n), parents, np.ones(n, dtype=np.float32))


def main() -> None:
    """Print the figures of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--vocab", type=int, default=151_936)
    args = parser.parse_args()
    ms = penalty_host_ms(args.batch, args.vocab)
    print(f"penalties: {ms:.2f} ms a step (batch {args.batch}, vocabulary {args.vocab})")


if __name__ == "__main__":
    main()
