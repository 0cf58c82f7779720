"""Our device path over fake CUDA tensors: what mixes devices, waits for one, or copies by the way.

PyTorch's FakeTensorMode carries shapes, dtypes and devices through every operator without a GPU. A
dispatch mode beside it looks at each operator: a tensor of the host among those of the device, an
operator whose result has a size that only the device knows, or a value that is read on the host.
Real are the worker's steps, acceptance, bias, penalties and the result; the target's pass, the
sampler and the compiled kernels (slots, walk of the trees, mask) are stand-ins that check what they
are given. What a step's arrays are copied with (cuda/staging.py) is counted, not run.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.emulation.overlap_loop import Allocator, LogitsOfStates, NoClock
from sglang_ext import worker
from sglang_ext.cuda import device_runtime, prefill
from sglang_ext.drafters import Bias
from sglang_ext.request_options import RelaxedRule
from sglang_ext.step import bias, penalties, verify_batch
from sglang_ext.step.bias import Expected
from sglang_ext.step.penalties import DevicePenalties
from sglang_ext.step.step_plan import Step, StepPlan
from sglang_ext.step.step_result import StepResult
from sglang_ext.step.verify_batch import VerifyBatches
from sglang_ext.tree import TokenTree, pack

VOCAB, WIDTH, LENGTH = 1000, 8, 20
NODES = (7, 3, 0)  # drafted for each of three requests
# Operators whose result the host must know before it can go on.
WAITS = frozenset({
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2",
})  # fmt: skip


class Watch(TorchDispatchMode):
    """Counts what a step does that it should not, by operator.

    Attributes:
        waits: operators that wait for the device.
        mixes: operators on tensors of the device and of the host, or from one to the other.
        copies: calls of `to_device`, which stands for cuda/staging.py's.
        calls: operators in all, each about a kernel's launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.mixes: Counter[str] = Counter()
        self.copies = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = self._devices((args, kwargs))
        self.calls += 1
        self.waits[name] += name in WAITS or self._indexes_by_mask(name, args)
        out = func(*args, **(kwargs or {}))
        made = self._devices(out)
        # lift_fresh: a tensor of the host is made, of which the device learns nothing.
        on_host = given == {"cpu"} and name != "lift_fresh"
        self.mixes[name] += len(given | made) > 1 or on_host
        return out

    def to_device(self, arrays: Sequence[np.ndarray], device: Any) -> list[torch.Tensor]:
        """The arrays on the device, as tensors without content."""
        assert torch.device(device).type == "cuda", device
        self.copies += 1
        return [
            torch.empty(a.shape, dtype=getattr(torch, a.dtype.name), device="cuda") for a in arrays
        ]

    @staticmethod
    def _devices(tree: Any) -> set[str]:
        return {x.device.type for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)}

    @staticmethod
    def _indexes_by_mask(name: str, args: Any) -> bool:
        return name in ("index", "index_put", "index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]
        )


class FakeStep:
    """One decode step of three requests over fake tensors.

    Args:
        greedy: whether all requests are.
        biased: whether two of them prefer some tokens.
        penalized: whether one is.
        relaxed: whether two of them have a relaxed rule, one of these by the drafter's
            log-probabilities.
    """

    def __init__(
        self,
        greedy: bool,
        biased: bool = False,
        penalized: bool = False,
        relaxed: bool = False,
    ) -> None:
        self.reqs = [self._request(str(i), penalized and i == 1) for i in range(len(NODES))]
        rng = np.random.default_rng(0)
        self.trees = [_tree(rng, n) for n in NODES]
        self.biases: list[Bias | None] = [None] * len(NODES)
        if biased:
            self.biases = [Bias([5, 6, 7], 0.2), None, Bias([1], 0.3)]
        rules: list[RelaxedRule | None] = [None] * len(NODES)
        if relaxed:
            rules = [RelaxedRule(by="drafter"), RelaxedRule(), None]
        self.running: Any = [
            SimpleNamespace(
                req=req,
                draft=SimpleNamespace(output=[1, 2, 3]),
                context=LENGTH,
                relaxed=rule,
                ends=np.array([2, 3]),
            )
            for req, rule in zip(self.reqs, rules, strict=True)
        ]
        self.info = self._sampling_info(greedy)
        self.chains = [TokenTree.empty()] * len(NODES)
        self.model_runner = SimpleNamespace(
            device="cuda",
            sampler=self._sampler,
            model=SimpleNamespace(logits_processor=LogitsOfStates()),
            model_config=SimpleNamespace(is_encoder_decoder=True),
        )
        self.worker = self._made_worker()

    def verify(self) -> StepResult:
        """A step that verifies the trees."""
        packed = pack([3] * len(NODES), self.trees, WIDTH)
        expected = Expected.of_trees(self.biases, self.trees, packed)
        return self.worker._verify(self._step(self.running, self.trees, StepPlan(packed, expected)))

    def plain(self) -> StepResult:
        """A plain step whose roots come from the host."""
        packed = pack([3] * len(NODES), [TokenTree.empty()] * len(NODES), 1)
        plan = StepPlan(packed, Expected.of_next_tokens(self.biases))
        return self.worker._decode_plainly(self._step(self.running, [], plan))

    def blind(self) -> StepResult:
        """A plain step whose roots are on the device."""
        bs = len(NODES)
        step = self._step()
        step.batch.spec_info = SimpleNamespace(  # type: ignore[assignment]
            accept_tokens=_on_device(bs * WIDTH, torch.int32),
            accept_lens=_on_device(bs, torch.int32),
        )
        return self.worker._decode_blindly(step)

    def prefill(self) -> StepResult:
        """A prefill; behind its prompts `chains` are read, where there are any."""
        step = self._step()
        step.batch.forward_mode = ForwardMode.EXTEND
        step.batch.sampling_info.logit_bias = None
        step.batch.encoder_lens = _on_device(len(NODES), torch.int64)
        return self.worker._prefill(step, None)

    def prefill_with_drafts(self) -> StepResult:
        """A prefill that reads a chain behind two of three prompts."""
        self.chains = [TokenTree.chain(list(range(n))) for n in NODES]
        return self.prefill()

    def get_memory_pool(self) -> tuple[Any, Any]:
        """The target's rows of slots, and who lends more."""
        rows = SimpleNamespace(req_to_token=_on_device((9, 64), torch.int32))
        return rows, Allocator(_on_device(99, torch.int64))

    def _step(
        self, running: Any = (), trees: Sequence[TokenTree] = (), plan: StepPlan | None = None
    ) -> Step:
        return Step(self._batch(), lambda _: None, running, trees=trees, plan=plan)

    def _made_worker(self) -> Any:
        made: Any = object.__new__(worker.SpeculativeWorker)
        made.device, made.enable_overlap = "cuda", True
        made.vocab_size, made.speculative_num_draft_tokens = VOCAB, WIDTH
        made.req_to_token_pool, _ = self.get_memory_pool()
        made._target_worker, made.model_runner = self, self.model_runner
        made._plans = True
        made.planner = SimpleNamespace(
            drafters={},
            take_counted=lambda: None,
            reads=lambda *_: 0.0,
            note_look=lambda _: None,
            note_step=lambda *_: None,
            prefill=lambda _: None,
            biases_in_prefill=lambda _: self.biases,
            foresee=lambda _: self.chains,
        )
        target: Any = self
        made._runtime = device_runtime.DeviceRuntime(target, made.planner, True)
        made._runtime._clock = NoClock()
        made._penalties = DevicePenalties(VOCAB, "cuda", len(NODES))
        made._batches = VerifyBatches(
            made._target_worker,
            made.req_to_token_pool,
            None,
            made._penalties,
            "cuda",
            on_host=False,
        )
        return made

    def forward_batch_generation(self, batch: Any, is_verify: bool = False, **_: Any) -> Any:
        rows = len(batch.input_ids) if is_verify else len(batch.reqs)
        if is_verify and batch.forward_mode == ForwardMode.EXTEND:
            states = _on_device((rows, VOCAB), torch.float32)
            processor = self.model_runner.model.logits_processor
            rows = len(processor(hidden_states=states, logits_metadata=batch))
            assert rows == sum(NODES) + len(NODES)
        return SimpleNamespace(
            logits_output=LogitsProcessorOutput(
                next_token_logits=_on_device((rows, VOCAB), torch.float32),
                next_token_logprobs=_on_device(rows, torch.float32),
            ),
            next_token_ids=_on_device(rows, torch.int32),
            can_run_cuda_graph=True,
        )

    @staticmethod
    def _sampler(output: Any, info: Any, *_: Any) -> torch.Tensor:
        rows = output.next_token_logits.shape[0]
        assert info.temperatures.shape == (rows, 1) and info.top_ps.shape == (rows,)
        return _on_device(rows, torch.int32)

    @staticmethod
    def _request(rid: str, penalized: bool) -> Any:
        params = SimpleNamespace(
            frequency_penalty=0.5,
            presence_penalty=0.1,
            repetition_penalty=1.1,
            min_new_tokens=9,
            stop_token_ids=[3],
            logit_bias=None,
        )
        if not penalized:
            params.frequency_penalty = params.presence_penalty = 0.0
            params.repetition_penalty, params.min_new_tokens = 1.0, 0
        return SimpleNamespace(
            rid=rid,
            kv=SimpleNamespace(kv_allocated_len=0),
            sampling_params=params,
            eos_token_ids={2},
            tokenizer=SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None),
        )

    @staticmethod
    def _sampling_info(greedy: bool) -> SamplingBatchInfo:
        bs = len(NODES)
        return SamplingBatchInfo(
            temperatures=_on_device((bs, 1), torch.float32),
            top_ps=_on_device(bs, torch.float32),
            top_ks=_on_device(bs, torch.int32),
            min_ps=_on_device(bs, torch.float32),
            is_all_greedy=greedy,
            is_any_greedy=True,
            need_top_p_sampling=True,
            need_top_k_sampling=True,
            need_min_p_sampling=False,
            vocab_size=VOCAB,
            logit_bias=_on_device((bs, VOCAB), torch.float32),
            has_custom_logit_processor=False,
        )

    def _batch(self) -> Any:
        bs = len(NODES)
        lens = np.full(bs, LENGTH)
        return SimpleNamespace(
            reqs=self.reqs,
            forward_mode=ForwardMode.DECODE,
            seq_lens=_on_device(bs, torch.int64),
            seq_lens_cpu=_HostLens(lens),
            seq_lens_sum=None,
            orig_seq_lens=_on_device(bs, torch.int32),
            req_pool_indices=_on_device(bs, torch.int64),
            encoder_lens=None,
            encoder_lens_cpu=None,
            input_ids=_on_device(bs * LENGTH, torch.int64),
            out_cache_loc=_on_device(bs * LENGTH, torch.int64),
            extend_lens=[LENGTH] * bs,
            extend_num_tokens=bs * LENGTH,
            chunked_req=None,
            spec_info=None,
            sampling_info=self.info,
            has_grammar=False,
            return_logprob=False,
            return_hidden_states=False,
            is_prefill_only=False,
        )


class _HostLens:
    """int64[bs] on the host, outside of the fake mode."""

    def __init__(self, lens: np.ndarray) -> None:
        self._lens = lens

    def numpy(self) -> np.ndarray:
        return self._lens

    def sum(self) -> int:
        return int(self._lens.sum())

    def __add__(self, other: Any) -> "_HostLens":
        # A tensor's values are not known here, and nothing asks for them.
        return _HostLens(self._lens + (other if isinstance(other, int) else 0))


def _on_device(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def _tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    parents = np.array([rng.integers(-1, i) for i in range(nodes)], dtype=np.int32)
    ones = np.ones(nodes, dtype=np.float32)
    return TokenTree(rng.integers(0, 100, nodes), parents, ones, logprobs=-ones)


# The compiled kernels


def _slots(**given: Any) -> torch.Tensor:
    for name in ("req_pool_indices", "req_to_token", "start_offset", "end_offset"):
        assert given[name].device.type == "cuda", name
    return _on_device(given["batch_size"] * given["draft_token_num"], torch.int64)


def _assign_slots(*given: Any) -> None:
    # mem_cache/allocation.py: both offsets are of one type.
    assert {tensor.device.type for tensor in given[:5]} == {"cuda"}
    assert given[2].dtype == given[3].dtype and given[4].shape == (sum(NODES),)


def _walk(**given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # kernels/ops/speculative: tree.cuh's verify_tree_greedy.
    for name in ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
                 "target_predict"):  # fmt: skip
        tensor = given[name]
        assert tensor.dtype == torch.int64 and tensor.is_contiguous(), name
        assert tensor.shape == (len(NODES), WIDTH) and tensor.device.type == "cuda", name
    for name in ("predicts", "accept_index", "accept_token_num"):
        assert given[name].dtype == torch.int32, name
    return given["predicts"], given["accept_index"], given["accept_token_num"]


def _columns(tree: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, out: Any) -> None:
    bs = len(NODES)
    assert tree.shape == (bs, WIDTH, WIDTH) and tree.dtype == torch.bool and tree.is_contiguous()
    assert lens.shape == starts.shape == (bs,) and lens.dtype == starts.dtype == torch.int64
    assert out.shape == (bs * WIDTH * (LENGTH + WIDTH),)


@contextmanager
def stand_ins(watch: Watch) -> Iterator[None]:
    """What is replaced while a fake step runs."""
    parallel = SimpleNamespace(tp_size=1, tp_group=SimpleNamespace(world_size=1))
    with ExitStack() as stack:
        for target, name, value in [
            (worker, "get_parallel", lambda: parallel),
            (device_runtime, "get_parallel", lambda: parallel),
            (verify_batch, "to_device", watch.to_device),
            (bias, "to_device", watch.to_device),
            (penalties, "to_device", watch.to_device),
            (verify_batch, "assign_extend_cache_locs_func", _slots),
            (prefill, "to_device", watch.to_device),
            (prefill, "assign_req_to_token_pool_func", _assign_slots),
            (prefill, "_use_here", lambda *_: None),
            (prefill.LogitsMetadata, "from_forward_batch", copy.copy),
            (verify_batch, "prepare_mamba_track_for_verify", lambda _: None),
            (verify_batch, "mambaish_config", lambda _: None),
            (verify_batch, "move_accept_tokens_to_target_kvcache", lambda *_: None),
        ]:
            stack.enter_context(mock.patch.object(target, name, value))
        for name, value in [
            ("sglang_ext.cuda.staging._launch_tree_columns", _columns),
            ("sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func", _walk),
        ]:
            stack.enter_context(mock.patch(name, value))
        yield


STEPS: dict[str, Callable[[], Callable[[], StepResult]]] = {
    "verify, greedy": lambda: FakeStep(greedy=True).verify,
    "verify, sampled": lambda: FakeStep(greedy=False).verify,
    "verify, greedy, biased": lambda: FakeStep(greedy=True, biased=True).verify,
    "verify, sampled, biased": lambda: FakeStep(greedy=False, biased=True).verify,
    "verify, greedy, relaxed": lambda: FakeStep(greedy=True, relaxed=True).verify,
    "verify, sampled, relaxed": lambda: FakeStep(greedy=False, relaxed=True).verify,
    "verify, penalized": lambda: FakeStep(greedy=True, penalized=True).verify,
    "plain": lambda: FakeStep(greedy=True).plain,
    "plain, penalized": lambda: FakeStep(greedy=True, penalized=True).plain,
    "plain, biased": lambda: FakeStep(greedy=False, biased=True).plain,
    "blind": lambda: FakeStep(greedy=True).blind,
    "prefill": lambda: FakeStep(greedy=True).prefill,
    "prefill, drafts": lambda: FakeStep(greedy=True).prefill_with_drafts,
    "prefill, biased": lambda: FakeStep(greedy=False, biased=True).prefill,
}


def watched(name: str) -> Watch:
    """What the step of STEPS by that name does while it is launched."""
    watch = Watch()
    with FakeTensorMode(allow_non_fake_inputs=True), stand_ins(watch):
        step = STEPS[name]()
        with watch:
            step()
    return watch


def fake_cuda_figures() -> dict[str, float]:
    """Print what each kind of step does.

    Returns:
        device_mixes, over all kinds; syncs_per_step, the most of any: waits while it is launched,
        and one for the last step's tokens, but in a blind one; copies_per_step, the most.
    """
    mixes, syncs, copies = 0, 0, 0
    print(f"{'step':26} {'operators':>9} {'copies':>7} {'waits':>6} {'mixes':>6}")
    for name in STEPS:
        watch = watched(name)
        waits = watch.waits.total() + (not name.startswith(("blind", "prefill")))
        print(f"{name:26} {watch.calls:9} {watch.copies:7} {waits:6} {watch.mixes.total():6}")
        for kind, found in {"waits": +watch.waits, "mixes": +watch.mixes}.items():
            if found:
                print(f"    {kind}: {dict(found)}")
        mixes += watch.mixes.total()
        syncs, copies = max(syncs, waits), max(copies, watch.copies)
    return {"device_mixes": mixes, "syncs_per_step": syncs, "copies_per_step": copies}
