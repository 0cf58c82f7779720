"""Graphs by width, checked with SGLang's real model runner, attention backend and graph runners.

    python -m scripts.emulation.graph_checks --json FILE
    TRITON_INTERPRET=1 python -m scripts.emulation.graph_checks --backend triton --steps 16

A small target with random weights runs random steps, one after the other with random widths and
batch sizes: under the graphs of their width (fake_graphs.py, over emulated FlashInfer kernels or
over Triton's in its interpreter), and eagerly as plain SGLang would run them. Both must give the
same logits. That width 1 is plain decoding and that no width disturbs another's tables follows.
"""

from sglang_ext.cpu.install import install as install_cpu_engine

install_cpu_engine()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import tempfile  # noqa: E402
from collections import Counter  # noqa: E402
from contextlib import ExitStack  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from scripts.emulation import fake_graphs, flashinfer, targets  # noqa: E402
from scripts.emulation.verify_cases import Step  # noqa: E402

FULL_WIDTH, MAX_REQUESTS, SLOTS = 8, 6, 2000
# A batch of 3 requests runs in the graph of 4, batches of 5 and 6 run eagerly.
CAPTURED_BATCHES = [1, 2, 4]
PREFIX = 40
WINDOW = 16  # of targets that have one; shorter than most prefixes


def model_runner(folder: Path, kind: str = "llama", backend: str = "flashinfer") -> Any:
    """SGLang's ModelRunner of a small target on the CPU, its own graphs captured as on CUDA.

    It publishes SGLang's configuration, so a process can make one only.

    Args:
        folder: where the target's configuration is written.
        kind: of target, one of targets.KINDS whose model runs on SGLang's CPU engine.
        backend: its attention backend, flashinfer or triton.
    """
    flashinfer.install(allow_float32=True, compute_dtype=torch.float64)
    fake_graphs.install()
    if backend == "triton":
        _install_triton()
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.utils.network import get_free_port

    from sglang_ext import cpu, plugin
    from sglang_ext.cuda.backends import prepare

    cpu.register()
    SpeculativeAlgorithm.register(
        plugin.ALGORITHM, supports_overlap=True, spec_class=plugin._host_drafted_algorithm()
    )(plugin._worker_class)
    args = _published_args(_config(kind, folder).model_path, backend)
    worker = TpModelWorker(server_args=args, gpu_id=0, nccl_port=get_free_port())
    # SGLang's dummy weights are all but zero, and so would be every difference.
    for weight in worker.model_runner.model.parameters():
        weight.data.normal_(0, 0.3)
    worker.alloc_memory_pool()
    worker.init_attention_backends()
    prepare(worker.model_runner.attn_backend, worker.model_runner)
    worker.init_cuda_graphs()
    return worker.model_runner


def _published_args(model_path: str, backend: str) -> Any:
    """SGLang's ServerArgs of a scheduler with one rank, published, and that rank's groups made."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed.bootstrap import init_parallel_runtime
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.network import get_free_port

    from sglang_ext import plugin

    args = ServerArgs(
        model_path=model_path,
        device="cpu",
        dtype="float32",
        load_format="dummy",
        attention_backend=backend,
        sampling_backend="pytorch",
        speculative_algorithm=plugin.ALGORITHM,
        speculative_num_draft_tokens=FULL_WIDTH,
        max_running_requests=MAX_REQUESTS,
        max_total_tokens=SLOTS,
        cuda_graph_bs_decode=CAPTURED_BATCHES,
        skip_tokenizer_init=True,
    )
    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    init_parallel_runtime(server_args=args, device="cpu", dist_port=get_free_port())
    return args


def _config(kind: str, folder: Path) -> Any:
    windows = "window" in targets.facts_expected(kind)
    return targets.model_config(kind, folder, **({"sliding_window": WINDOW} if windows else {}))


def _install_triton() -> None:
    """Let TritonAttnBackend run without CUDA; its masks are laid out as on CUDA."""
    from sglang.srt.layers.attention import triton_backend, verify_mask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    triton_backend.get_device_core_count = lambda _: 0
    verify_mask.default_tree_mask_mode = lambda: TreeMaskMode.FULL_MASK


class Steps:
    """Random decode and verify steps of requests with `PREFIX` tokens or less."""

    def __init__(self, runner: Any, seed: int):
        self._runner = runner
        self._rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        pool = runner.token_to_kv_pool
        for layer in range(runner.model_config.num_hidden_layers):
            for cache in pool.get_kv_buffer(layer):
                cache.normal_()

    def batch(self, bs: int, width: int) -> Any:
        """A ForwardBatch of `bs` requests: plain decoding where `width` is 1, else verification."""
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        rng, runner = self._rng, self._runner
        lens = torch.from_numpy(rng.integers(1, PREFIX + 1, bs))
        rows = torch.from_numpy(rng.permutation(MAX_REQUESTS)[:bs] + 1)
        table = runner.req_to_token_pool.req_to_token
        slots = torch.from_numpy(1 + rng.permutation(SLOTS - 1)).int()
        new_slots = []
        for n, row, length in zip(range(bs), rows, lens, strict=True):
            own = slots[n * (PREFIX + width) :][: length + width]
            table[row, : length + width] = own
            new_slots.append(own[length:])
        plain = width == 1
        tokens = torch.from_numpy(rng.integers(0, runner.model_config.vocab_size, bs * width))
        spec_info, positions = (None, lens) if plain else self._verify_input(lens, tokens, width)
        seq_lens = lens + 1 if plain else lens
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if plain else ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=tokens,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=int(seq_lens.sum()),
            orig_seq_lens=seq_lens,
            out_cache_loc=torch.cat(new_slots).long(),
            positions=positions,
            spec_algorithm=runner.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )

    def _verify_input(self, lens: torch.Tensor, tokens: torch.Tensor, width: int) -> Any:
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        bs, step = len(lens), Step.random(self._rng, lens.tolist(), width)
        verify_input = NgramVerifyInput(
            draft_token=tokens,
            custom_mask=step.mask(),
            positions=step.positions(),
            retrieve_index=torch.arange(bs * width).view(bs, width),
            retrieve_next_token=torch.from_numpy(step.packed.next_token),
            retrieve_next_sibling=torch.from_numpy(step.packed.next_sibling),
            draft_token_num=width,
        )
        return verify_input, verify_input.positions


def check(runner: Any, by_width: Any, steps: int, seed: int = 0) -> dict[str, Any]:
    """Run random steps both ways.

    Returns:
        steps and graph_steps by width, missed_graphs (steps that had a graph and ran without
        it), the largest difference of a logit, and how large logits are.
    """
    made = Steps(runner, seed)
    rng = np.random.default_rng(seed)
    ran: Counter[int] = Counter()
    replayed: Counter[int] = Counter()
    missed, worst, largest = 0, 0.0, 0.0
    for _ in range(steps):
        width, bs = int(rng.choice(by_width.widths)), int(rng.integers(1, MAX_REQUESTS + 1))
        batch = made.batch(bs, width)
        with by_width.use(width):
            output = runner.forward(batch)
        ran[width] += 1
        replayed[width] += output.can_run_graph
        missed += bs <= CAPTURED_BATCHES[-1] and not output.can_run_graph
        logits = output.logits_output.next_token_logits.clone()
        expected = _eagerly(runner, batch)
        worst = max(worst, float((logits - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return {
        "widths": list(by_width.widths),
        "steps": dict(sorted(ran.items())),
        "graph_steps": dict(sorted(replayed.items())),
        "missed_graphs": missed,
        "max_error": worst,
        "max_logit": largest,
    }


def _eagerly(runner: Any, batch: Any) -> torch.Tensor:
    before, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
    try:
        return runner.forward(batch).logits_output.next_token_logits.clone()
    finally:
        runner.decode_cuda_graph_runner = before


def run(steps: int, kind: str = "llama", backend: str = "flashinfer") -> dict[str, Any]:
    """Capture every width and check it; once in a process.

    Returns:
        as `check`, and padded_batches of 1, 2, ... requests; modes, of each width captured by us
        the forward mode and tokens per request; bytes, of each its backend's buffers as they are
        and as they were estimated.
    """
    from sglang_ext.cuda.graphs import WidthGraphs, _buffer_bytes
    from sglang_ext.options import Options

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(torch.no_grad())
        runner = model_runner(Path(folder), kind, backend)
        by_width = WidthGraphs(runner, Options())
        result = check(runner, by_width, steps)
        result["padded_batches"] = [by_width.padded_batch(n + 1) for n in range(MAX_REQUESTS + 1)]
        result["modes"] = {
            str(width): [tier.runner.capture_forward_mode.name, tier.runner.captured_req_width]
            for width, tier in sorted(by_width._tiers.items())
        }
        result["bytes"] = {
            str(width): [sum(_buffer_bytes(tier.attn_backend)), by_width._bytes_of(width)]
            for width, tier in sorted(by_width._tiers.items())
        }
        return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--target", default="llama", choices=("llama", "gemma-2", "gemma-3"))
    parser.add_argument("--backend", default="flashinfer", choices=("flashinfer", "triton"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = json.dumps(run(args.steps, args.target, args.backend), indent=2)
    if args.json:
        args.json.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
