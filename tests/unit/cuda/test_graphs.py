"""Which widths get graphs, what they are captured with, and how a step takes them.

The runners and backends here are stand-ins that record; tests/emulated/test_captured_graphs.py runs
SGLang's own.
"""

import inspect
import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.graph_memory_usage import GRAPH_MEMORY_USAGE_KEYS
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.cuda import graphs
from sglang_ext.cuda.graphs import WidthGraphs
from sglang_ext.options import Options

GIB = 1 << 30
FULL = 16
SPEC = "a stand-in"
FREE = 40.0


class Backend(AttentionBackend):
    """An attention backend of 1.5 GiB: a workspace, and tables for graphs that are never filled."""

    def __init__(self):
        self.workspace_buffer = torch.empty(GIB // 2, dtype=torch.uint8, device="meta")
        self.cuda_graph_kv_indices = [torch.empty(GIB // 4, dtype=torch.int32, device="meta")]
        self.kv_indptr = torch.empty(GIB, dtype=torch.uint8, device="meta")  # not for graphs


class GraphRunner:
    """What DecodeCudaGraphRunner is to us, with what it found when it was made."""

    made: list["GraphRunner"]
    disable_padding = False
    capture_bs = (1, 2, 4, 8, 12)

    def __init__(self, model_runner, **kwargs):
        inspect.signature(DecodeCudaGraphRunner).bind(model_runner, **kwargs)
        spec = get_spec()
        self.attn_backend = kwargs.get("attn_backend")
        self.seen = (
            model_runner.spec_algorithm,
            spec.speculative_algorithm,
            spec.speculative_num_draft_tokens,
            spec.speculative_eagle_topk,
        )
        self.captured_req_width = spec.speculative_num_draft_tokens or 1
        GraphRunner.made.append(self)


class Runner(SimpleNamespace):
    """The parts of SGLang's ModelRunner that are touched."""

    def _get_attention_backend(self, init_new_workspace=False):
        self.init_new_workspace = init_new_workspace  # as attention_backend_setup.py does
        backend = Backend()
        backend.new_workspace = init_new_workspace
        return backend


@pytest.fixture
def runner(monkeypatch):
    """A model runner whose full width SGLang has captured; 40 GiB are free."""
    args = ServerArgs(
        model_path="dummy",
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=FULL,
        speculative_eagle_topk=2,
    )
    runtime_context.publish(args, role="scheduler")
    GraphRunner.made = []
    made = Runner(
        attn_backend=Backend(),
        spec_algorithm=SPEC,
        device="cuda",
        gpu_id=0,
        init_new_workspace=False,
        prefill_attention_backend_str="flashinfer",
        decode_attention_backend_str="flashinfer",
        graph_memory_usage={"target_verify": 1.25},
        token_to_kv_pool=SimpleNamespace(post_capture_active=False),
        tp_group=SimpleNamespace(rank=1, ranks=[7, 8], cpu_group="gloo"),
        sliding_window_size=None,
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )
    made.decode_cuda_graph_runner = GraphRunner(made)
    GraphRunner.made.clear()
    monkeypatch.setattr(graphs, "mambaish_config", lambda config: None)
    made.asked = []

    def free(*args, **kwargs):
        made.asked.append(kwargs)
        return FREE - sum(w.captured_req_width / FULL + 0.75 for w in GraphRunner.made)

    monkeypatch.setattr(graphs, "get_available_gpu_memory", free)
    yield made
    runtime_context.reset_context()


def eager(runner):
    runner.decode_cuda_graph_runner = None
    return runner


def test_each_width_is_captured_once_the_most_wanted_first(runner):
    made = WidthGraphs(runner, Options())
    assert made.widths == (1, 2, 4, 8, 16)
    assert [r.captured_req_width for r in GraphRunner.made] == [1, 8, 4, 2]


def test_width_1_is_captured_as_if_there_were_no_speculation(runner):
    WidthGraphs(runner, Options())
    plain, eight = GraphRunner.made[:2]
    assert plain.seen == (SpeculativeAlgorithm.NONE, None, None, None)
    assert eight.seen == (SPEC, "NGRAM", 8, 2)


def test_afterwards_all_is_as_it_was(runner):
    before = dict(vars(runner))
    WidthGraphs(runner, Options())
    assert vars(runner) == before
    assert get_spec().speculative_algorithm == "NGRAM"
    assert get_spec().speculative_num_draft_tokens == FULL


def test_each_width_has_a_backend_and_a_workspace_of_its_own(runner):
    WidthGraphs(runner, Options())
    backends = [r.attn_backend for r in GraphRunner.made]
    assert len({id(b) for b in [runner.attn_backend, *backends]}) == 5
    assert all(b.new_workspace for b in backends)
    assert {b.decode_attention_backend_str for b in backends} == {"flashinfer"}
    assert {b.prefill_attention_backend_str for b in backends} == {"flashinfer"}


def test_a_step_runs_with_its_widths_backend_and_graphs(runner):
    made = WidthGraphs(runner, Options())
    own = runner.attn_backend, runner.decode_cuda_graph_runner
    by_width = {r.captured_req_width: r for r in GraphRunner.made}
    for width in (1, 2, 4, 8):
        with made.use(width):
            assert runner.decode_cuda_graph_runner is by_width[width]
            assert runner.attn_backend is by_width[width].attn_backend
        assert (runner.attn_backend, runner.decode_cuda_graph_runner) == own
    with made.use(16):
        assert (runner.attn_backend, runner.decode_cuda_graph_runner) == own


def test_a_step_that_fails_leaves_no_trace(runner):
    made = WidthGraphs(runner, Options())
    own = runner.attn_backend, runner.decode_cuda_graph_runner
    with pytest.raises(ZeroDivisionError), made.use(4):
        raise ZeroDivisionError
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == own


def test_the_smallest_width_that_holds_a_tree_is_taken(runner):
    made = WidthGraphs(runner, Options(cuda_widths="4,6"))
    assert made.widths == (1, 4, 6, 16)
    assert [made.fit(n) for n in (1, 2, 4, 5, 6, 7, 16)] == [1, 4, 4, 6, 6, 16, 16]


def test_a_batch_is_padded_to_its_graphs(runner):
    made = WidthGraphs(runner, Options())
    assert [made.padded_batch(n) for n in (1, 3, 4, 9, 12, 13)] == [1, 4, 4, 12, 12, 13]
    runner.decode_cuda_graph_runner.disable_padding = True
    assert made.padded_batch(3) == 3


@pytest.mark.parametrize(
    "options",
    [Options(budget="fixed"), Options(drafter="none")],
)
def test_widths_that_no_step_can_take_are_not_captured(runner, options):
    assert WidthGraphs(runner, options).widths == (1, 16)
    assert [r.captured_req_width for r in GraphRunner.made] == [1]


def test_a_width_that_does_not_fit_the_draft_tokens_is_refused(runner):
    with pytest.raises(ValueError, match="--cuda-widths 4,32: expected widths of at most 16"):
        WidthGraphs(runner, Options(cuda_widths="4,32"))


def test_without_graphs_every_width_runs_eagerly(runner):
    made = WidthGraphs(eager(runner), Options())
    assert made.widths == (1, 2, 4, 8, 16) and GraphRunner.made == []
    own = runner.attn_backend
    with made.use(4):
        assert runner.attn_backend is own and runner.decode_cuda_graph_runner is None
    assert made.padded_batch(3) == 3


def test_the_cpu_engines_graphs_for_plain_steps_are_not_taken_for_ours(runner):
    runner.decode_cuda_graph_runner.captured_req_width = 1
    assert WidthGraphs(runner, Options()).widths == (1, 2, 4, 8, 16)
    assert GraphRunner.made == []


def test_an_eager_backend_that_keeps_its_width_verifies_no_other(runner):
    runner.prefill_attention_backend_str = "fa3"
    assert WidthGraphs(eager(runner), Options()).widths == (1, 16)


@pytest.mark.parametrize("feature", ["enable_pdmux", "enable_two_batch_overlap"])
def test_a_wrapped_attention_backend_stays_the_only_one(runner, monkeypatch, feature):
    off = {"enable_pdmux": False, "enable_two_batch_overlap": False}
    settings = SimpleNamespace(**off | {feature: True})
    monkeypatch.setattr(graphs, "get_disagg", lambda: settings)
    monkeypatch.setattr(graphs, "get_exec", lambda: SimpleNamespace(overlap=settings))
    assert WidthGraphs(runner, Options()).widths == (1, 16)
    assert GraphRunner.made == []


def test_a_mamba_target_whose_states_are_tracked_has_no_plain_steps(runner, monkeypatch):
    monkeypatch.setattr(graphs, "mambaish_config", lambda config: object())
    mamba = SimpleNamespace(enable_mamba_extra_buffer=True)
    overlap = SimpleNamespace(enable_two_batch_overlap=False)
    monkeypatch.setattr(graphs, "get_exec", lambda: SimpleNamespace(mamba=mamba, overlap=overlap))
    made = WidthGraphs(runner, Options())
    assert made.widths == (2, 4, 8, 16) and made.fit(1) == 2
    mamba.enable_mamba_extra_buffer = False
    assert WidthGraphs(runner, Options()).widths == (1, 2, 4, 8, 16)


def test_each_backend_is_prepared_for_trees_before_its_capture(runner, monkeypatch):
    prepared = []

    def prepare(backend, model_runner):
        prepared.append((backend, model_runner, len(GraphRunner.made)))

    monkeypatch.setattr(graphs, "prepare", prepare)
    WidthGraphs(runner, Options())
    assert prepared == [(r.attn_backend, runner, n) for n, r in enumerate(GraphRunner.made)]


def test_a_width_takes_its_workspace_its_share_of_the_tables_and_the_graphs(runner):
    """Of 1.25 GiB that SGLang's own capture took, 1 is tables and 0.25 are the graphs."""
    made = WidthGraphs(runner, Options())
    assert made._bytes_of(16) / GIB == 1.75
    assert made._bytes_of(4) / GIB == 1.0


def test_a_backend_of_several_counts_them_all(runner):
    runner.attn_backend.full_attn_backend = Backend()
    assert WidthGraphs(runner, Options())._bytes_of(16) / GIB == 3.0


def test_widths_end_where_memory_does(runner, monkeypatch, caplog):
    """1 takes about 0.8 GiB, 8 takes 1.25; of 3.4 GiB half may be taken."""
    monkeypatch.setattr(f"{__name__}.FREE", 3.4)
    with caplog.at_level(logging.WARNING):
        made = WidthGraphs(runner, Options())
    assert made.widths == (1, 16)
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("No graphs for width 8: they take about 1.2 GiB of 2.6")


def test_a_kv_cache_that_is_sized_later_keeps_nine_tenths(runner, monkeypatch):
    monkeypatch.setattr(f"{__name__}.FREE", 20.0)
    runner.token_to_kv_pool.post_capture_active = True
    assert WidthGraphs(runner, Options()).widths == (1, 16)
    runner.token_to_kv_pool.post_capture_active = False
    GraphRunner.made.clear()
    assert WidthGraphs(runner, Options()).widths == (1, 2, 4, 8, 16)


@contextmanager
def two_ranks(monkeypatch, rank_0_says):
    asked = []

    def broadcast(values, rank, group, src):
        asked.append((values, rank, group, src))
        return [rank_0_says.pop(0)]

    monkeypatch.setattr(graphs, "broadcast_pyobj", broadcast)
    with get_parallel().override(tp_size=2, attn_tp_size=2, moe_tp_size=2):
        yield asked


def test_ranks_capture_what_rank_0_says_of_the_least_memory(runner, monkeypatch):
    with two_ranks(monkeypatch, [True, True, False]) as asked:
        made = WidthGraphs(runner, Options())
    assert made.widths == (1, 8, 16)
    assert [r.captured_req_width for r in GraphRunner.made] == [1, 8]
    assert asked[0] == ([True], 1, "gloo", 7)
    assert all(a == {"distributed": True, "cpu_group": "gloo"} for a in runner.asked)


def test_a_capture_that_fails_says_what_to_do(runner, monkeypatch):
    before = dict(vars(runner))

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GraphRunner, "__init__", fail)
    with pytest.raises(RuntimeError, match="graphs for width 1 failed; lower --mem-fraction"):
        WidthGraphs(runner, Options())
    assert vars(runner) == before and get_spec().speculative_algorithm == "NGRAM"


def not_assigned(cls, *names):
    source = inspect.getsource(cls)
    return [
        name for name in names if f"self.{name} = " not in source and f"self.{name}:" not in source
    ]


def test_sglang_still_has_what_is_touched_here():
    """Where an upgrade of SGLang breaks this, the stand-ins above are wrong, too."""
    assert not not_assigned(
        ModelRunner,
        "attn_backend",
        "decode_cuda_graph_runner",
        "init_new_workspace",
        "spec_algorithm",
        "prefill_attention_backend_str",
        "decode_attention_backend_str",
        "graph_memory_usage",
        "gpu_id",
    )
    assert "init_new_workspace" in inspect.signature(ModelRunner._get_attention_backend).parameters
    assert not not_assigned(
        DecodeCudaGraphRunner, "captured_req_width", "disable_padding", "attn_backend"
    )
    assert "self.capture_bs, self.compile_bs = " in inspect.getsource(DecodeCudaGraphRunner)
    assert "target_verify" in GRAPH_MEMORY_USAGE_KEYS
    assert hasattr(KVCache, "post_capture_active")
    assert not not_assigned(
        FlashInferAttnBackend,
        "workspace_buffer",
        "cuda_graph_kv_indices",
        "cuda_graph_custom_mask",
    )
    assert not not_assigned(
        TritonAttnBackend, "cuda_graph_attn_logits", "cuda_graph_kv_indices", "_verify_mask"
    )


def test_sglangs_own_forward_pass_looks_where_the_width_is_set():
    source = inspect.getsource(ModelRunner._forward_raw)
    assert "self.decode_cuda_graph_runner.can_run_graph(forward_batch)" in source
    assert "ForwardContext(attn_backend=self.attn_backend)" in source
