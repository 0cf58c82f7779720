"""A small target of SGLang's own, and what an early exit sees of it; prints what it found as JSON.

Run as `python -m tests.unit.mirror.real_target KIND FOLDER`: SGLang's configuration is published
once in a process.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_ext.cpu.install import install

install()

import torch  # noqa: E402

from scripts.emulation import targets  # noqa: E402
from sglang_ext.cpu.linear import PREPACK_VARIABLE  # noqa: E402
from sglang_ext.cpu.packed_weights import packed_product  # noqa: E402

DEPTH, EXIT, KAPPA = 4, 2, 5
TEXTS = [[5, 9, 200, 31, 7], [77, 78, 79]]


class Words:
    """A tokenizer whose tokens are made of words."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [sum(map(ord, word)) % 256 for word in text.split()]


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    os.environ[PREPACK_VARIABLE] = "0"  # weights are changed in place below
    runner = runner_of(kind, folder)
    from sglang_ext.drafters.target_reader import TargetReader

    reader = TargetReader(runner)
    found: dict[str, Any] = {"plain": reader.read(TEXTS).tolist()}
    worker = SimpleNamespace(model_runner=runner, tokenizer=Words())
    found |= tapped(runner, reader)
    found |= opened(worker, reader)
    found |= without_suffix(runner, reader)
    print(json.dumps(found))


def runner_of(kind: str, folder: Path) -> Any:
    """SGLang's ModelRunner of a small model with random weights."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed.bootstrap import init_parallel_runtime
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.network import get_free_port

    from sglang_ext import cpu

    cpu.register()
    config = targets.model_config(kind, folder, num_hidden_layers=DEPTH)
    args = ServerArgs(
        model_path=config.model_path, device="cpu", dtype="float32", load_format="dummy",
        attention_backend="tree_cpu", sampling_backend="pytorch", max_running_requests=8,
        max_total_tokens=4096, skip_tokenizer_init=True,
    )  # fmt: skip
    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    init_parallel_runtime(server_args=args, device="cpu", dist_port=get_free_port())
    worker = TpModelWorker(server_args=args, gpu_id=0, nccl_port=get_free_port())
    torch.manual_seed(0)
    for weight in worker.model_runner.model.parameters():
        weight.data.normal_(0, 0.1)
    worker.alloc_memory_pool()
    worker.init_attention_backends()
    worker.init_cuda_graphs()
    return worker.model_runner


def tapped(runner: Any, reader: Any) -> dict[str, Any]:
    """Both taps in one pass: its logits, and those that the parts make of its final states."""
    from sglang_ext.mirror.target_parts import parts_of, tap_normed, tap_state

    seen: dict[str, torch.Tensor] = {}
    parts = parts_of(runner.model, DEPTH, 256)
    ends = [
        tap_state(parts.layers, EXIT, lambda state: seen.update(state=state.clone())),
        tap_normed(parts.norm, lambda final: seen.update(final=final.clone())),
    ]
    logits = reader.read(TEXTS)
    for end in ends:
        end()
    last = torch.tensor([len(TEXTS[0]) - 1, sum(map(len, TEXTS)) - 1])
    return {
        "tapped": logits.tolist(),
        "of_finals": parts.logits(seen["final"])[last].tolist(),
        "shapes": [list(seen[name].shape) for name in ("state", "final")],
    }


def opened(worker: Any, reader: Any) -> dict[str, Any]:
    """Exits as a server opens them: candidates of the paper's, and whether a lens was fitted."""
    from sglang_ext.mirror.early_exit import open_exit
    from sglang_ext.options import Options

    given = {"mirror_exit_layer": EXIT, "mirror_kappa": KAPPA, "mirror_head_tokens": 0}
    seen: dict[str, Any] = {}
    paper = open_exit(worker, Options(mirror_lens="head", **given), [])
    assert paper is not None
    total = sum(map(len, TEXTS))
    with paper.watching(None, total, lambda tokens, _: seen.update(paper=tokens.tolist())):
        seen["watched"] = reader.read(TEXTS).tolist()
    paper.close()
    given |= {"mirror_lens_seconds": 4.0, "mirror_head_tokens": 64}
    lensed = open_exit(worker, Options(**given), [], packed_product)
    assert lensed is not None
    with lensed.watching(None, total, lambda tokens, _: seen.update(lensed=tokens.tolist())):
        reader.read(TEXTS)
    lensed.close()
    lens = lensed.proxy.lens
    return seen | {"lens_tokens": 0 if lens is None else lens.tokens}


@torch.no_grad()
def without_suffix(runner: Any, reader: Any) -> dict[str, Any]:
    """What the target says, and the exit, once layers behind the exit add nothing."""
    from sglang_ext.mirror.proxy import Proxy
    from sglang_ext.mirror.target_parts import parts_of, tap_normed, tap_state

    parts = parts_of(runner.model, DEPTH, 256)
    for layer in parts.layers[EXIT:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    seen: dict[str, torch.Tensor] = {}
    tap_state(parts.layers, EXIT, lambda state: seen.update(state=state.clone()))
    end = tap_normed(parts.norm, lambda final: seen.update(final=final.clone()))
    reader.read(TEXTS)
    end()
    normed = Proxy(parts, KAPPA).normalised(seen["state"])
    return {"apart": float((normed - seen["final"]).abs().max()), "size": float(normed.abs().max())}


if __name__ == "__main__":
    main()
