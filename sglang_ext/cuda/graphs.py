"""One CUDA graph set per verify width, and one for plain decode steps.

SGLang captures one set of graphs, for verification of --speculative-num-draft-tokens nodes a
request; every other step runs eagerly, bound by kernel launches. Here each further width gets an
attention backend and a DecodeCudaGraphRunner of its own, as SGLang's adaptive EAGLE worker does
(speculative/eagle_worker_v2.py, build_adaptive_runtime_state), and width 1 a true DECODE graph,
captured as if there were no speculation, so that a plain step runs plain SGLang's own kernels.

A backend of its own per width is needed: FlashInfer keeps its buffers and its plans by batch
size only (flashinfer_backend.py, init_cuda_graph_state), FlashAttention 3 and Triton keep the
width that they were made with. Of the eager paths only FlashAttention 3's reads that width
instead of the batch's own (flashattention_backend.py, init_forward_metadata).
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils import broadcast_pyobj, get_available_gpu_memory

from sglang_ext.cuda.backends import prepare
from sglang_ext.cuda.widths import default_widths
from sglang_ext.options import Options

logger = logging.getLogger(__name__)

_GIB = 1 << 30
# How much of the memory that SGLang has left free our graphs may take: half of it, or a tenth
# where its KV cache is sized after the capture and would have got the rest.
SHARE = 0.5
SHARE_BEFORE_KV_CACHE = 0.1
# What a process without speculation has in these fields (arg_groups/fields/speculative.py).
_NO_SPECULATION: dict[str, None] = {
    "speculative_algorithm": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
}


class _Tier(NamedTuple):
    """What a forward pass of one width runs with."""

    attn_backend: Any
    runner: Any


class WidthGraphs:
    """The target's graphs by verify width; made once, after SGLang has captured its own.

    Attributes:
        widths: nodes per request that a step may run, ascending; 1 is a plain decode step and
            the last one is --speculative-num-draft-tokens. 1 is missing for Mamba targets whose
            states are tracked for the prefix cache, which a plain step would not do.
    """

    def __init__(self, model_runner: Any, options: Options):
        """Capture what `options.cuda_widths` and the memory allow.

        Where nothing is captured (no CUDA device, --disable-cuda-graph) every width runs
        eagerly and `use` changes nothing.

        Args:
            model_runner: the target's ModelRunner, its own graphs captured.

        Raises:
            ValueError: a width of the option is larger than --speculative-num-draft-tokens.
            RuntimeError: a capture failed.
        """
        self._model_runner = model_runner
        self._tiers: dict[int, _Tier] = {}
        self._own = model_runner.decode_cuda_graph_runner
        full = get_spec().speculative_num_draft_tokens
        first = () if _tracks_states(model_runner) else (1,)
        between = tuple(w for w in _wanted(options, full) if w < full)
        # An eager runner knows no width, the CPU engine's graphs are for plain decode steps.
        captured = getattr(self._own, "captured_req_width", None) == full
        if captured and not _shares_the_device():
            taken = self._capture(first + between[::-1])
            between = tuple(w for w in between if w in taken)
        elif captured or _keeps_its_width(model_runner):
            between = ()
        self.widths = first + between + (full,)

    def fit(self, width: int) -> int:
        """The smallest width that holds a tree of `width` nodes, the root included."""
        return self.widths[bisect_left(self.widths, width)]

    def padded_batch(self, bs: int) -> int:
        """How many requests the graph runs for a batch of `bs`; `bs` where it runs eagerly."""
        sizes = getattr(self._own, "capture_bs", [])
        if not sizes or bs > sizes[-1] or self._own.disable_padding:
            return bs
        return sizes[bisect_left(sizes, bs)]

    @contextmanager
    def use(self, width: int) -> Iterator[None]:
        """Within it, the target's forward passes have `width` tokens per request.

        What reads the attention backend after the forward pass belongs inside, too
        (commit_mamba_states_after_verify).
        """
        tier = self._tiers.get(width)
        if tier is None:
            yield
            return
        with _replaced(self._model_runner, tier):
            yield

    def _capture(self, widths: tuple[int, ...]) -> tuple[int, ...]:
        """Capture `widths`, the most wanted first, while memory lasts; returns the captured."""
        start = time.perf_counter()
        at_first = free = self._free_bytes()
        late_pool = self._model_runner.token_to_kv_pool.post_capture_active
        keep = at_first * (1 - (SHARE_BEFORE_KV_CACHE if late_pool else SHARE))
        for n, width in enumerate(widths):
            need = self._bytes_of(width)
            if not _agreed(self._model_runner, free - need >= keep):
                widths = widths[:n]
                logger.warning(
                    "No graphs for width %d: they take about %.1f GiB of %.1f GiB, and %.1f GiB "
                    "must stay free; lower --mem-fraction-static or --max-running-requests",
                    width, need / _GIB, free / _GIB, keep / _GIB,
                )  # fmt: skip
                break
            self._tiers[width] = self._captured_tier(width)
            free = self._free_bytes()
        logger.info(
            "Graphs captured for widths %s beside SGLang's own: %.1f s, %.1f GiB",
            ", ".join(map(str, sorted(widths))) or "none",
            time.perf_counter() - start,
            (at_first - free) / _GIB,
        )
        return widths

    def _captured_tier(self, width: int) -> _Tier:
        runner = self._model_runner
        with ExitStack() as stack:
            if width == 1:
                stack.enter_context(get_spec().override(**_NO_SPECULATION))
                stack.enter_context(_set(runner, spec_algorithm=SpeculativeAlgorithm.NONE))
            else:
                stack.enter_context(get_spec().override(speculative_num_draft_tokens=width))
            try:
                backend = _new_backend(runner)
                return _Tier(backend, type(self._own)(runner, attn_backend=backend))
            except Exception as error:
                raise RuntimeError(
                    f"capturing graphs for width {width} failed; lower --mem-fraction-static, or "
                    "leave the width out with --cuda-widths"
                ) from error

    def _free_bytes(self) -> float:
        """Free device memory, of the rank that has least."""
        runner = self._model_runner
        several = get_parallel().tp_size > 1
        return _GIB * get_available_gpu_memory(
            runner.device,
            runner.gpu_id,
            distributed=several,
            cpu_group=runner.tp_group.cpu_group if several else None,
        )

    def _bytes_of(self, width: int) -> float:
        """About what a width takes: its workspace, its tables, and graphs like SGLang's own."""
        runner = self._model_runner
        tables, workspace = _buffer_bytes(runner.attn_backend)
        of_sglang = _GIB * runner.graph_memory_usage.get("target_verify", 0.0)
        graphs = max(0.0, of_sglang - tables)
        return workspace + tables * width / self._own.captured_req_width + graphs


def _wanted(options: Options, full: int) -> tuple[int, ...]:
    """The widths between 1 and `full` to capture, ascending."""
    if options.cuda_widths:
        widths = sorted({int(width) for width in options.cuda_widths.split(",")} | {full})
        if widths[-1] > full:
            raise ValueError(
                f"--cuda-widths {options.cuda_widths}: expected widths of at most {full} "
                "(--speculative-num-draft-tokens)"
            )
        return tuple(width for width in widths if width > 1)
    if options.budget == "fixed" or not options.loaded_drafters():
        return ()
    return default_widths(full)[1:]


def _tracks_states(model_runner: Any) -> bool:
    return (
        mambaish_config(model_runner.model_config) is not None
        and get_exec().mamba.enable_mamba_extra_buffer
    )


def _shares_the_device() -> bool:
    """Whether SGLang wraps or splits the attention backend, which a width's own would not be."""
    return get_disagg().enable_pdmux or get_exec().overlap.enable_two_batch_overlap


def _keeps_its_width(model_runner: Any) -> bool:
    return "fa3" in (
        model_runner.prefill_attention_backend_str,
        model_runner.decode_attention_backend_str,
    )


def _agreed(model_runner: Any, value: bool) -> bool:
    """Rank 0's value on every rank: a capture by some ranks only would wait for ever."""
    if get_parallel().tp_size == 1:
        return value
    group = model_runner.tp_group
    return broadcast_pyobj([value], group.rank, group.cpu_group, src=group.ranks[0])[0]


def _new_backend(model_runner: Any) -> Any:
    """Another attention backend of the target, with a workspace of its own."""
    with _set(model_runner, init_new_workspace=model_runner.init_new_workspace):
        backend = model_runner._get_attention_backend(init_new_workspace=True)
    # As model_runner_components/attention_backend_setup.py leaves them for the models to read.
    backend.prefill_attention_backend_str = model_runner.prefill_attention_backend_str
    backend.decode_attention_backend_str = model_runner.decode_attention_backend_str
    prepare(backend, model_runner)
    return backend


def _buffer_bytes(backend: Any) -> tuple[int, int]:
    """Bytes of a backend's tables for graphs, which grow with the width, and of its workspace."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    tables = workspace = 0
    for name, value in vars(backend).items():
        if isinstance(value, AttentionBackend):  # of a backend that is made of several
            inner = _buffer_bytes(value)
            tables, workspace = tables + inner[0], workspace + inner[1]
        elif name == "workspace_buffer":
            workspace += value.nbytes
        elif name == "_verify_mask" and value is not None:
            tables += value.buffer.nbytes
        elif name.startswith("cuda_graph_"):
            values = value if isinstance(value, list) else [value]
            tables += sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
    return tables, workspace


def _replaced(model_runner: Any, tier: _Tier) -> Any:
    return _set(model_runner, attn_backend=tier.attn_backend, decode_cuda_graph_runner=tier.runner)


@contextmanager
def _set(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `target`, and put back what was there."""
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
