"""The marks of relaxed tokens through SGLang's own code, in a process that is hooked for it."""

import subprocess
import sys
import textwrap

SCRIPT = """
from types import SimpleNamespace

from sglang_ext.cpu.install import install

install()

import torch
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_ext.step import relaxed_info, token_info
from sglang_ext.step.step_result import StepResult

token_info.register()
relaxed_info.tell_of_relaxed_tokens()
Processor = batch_result_processor.SchedulerBatchResultProcessor


def request(relaxed):
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params={"relaxed": {}} if relaxed else None),
        output_ids=[4], customized_info=None, is_retracted=False, grammar=None,
        finished=lambda: False, kv=SimpleNamespace(kv_committed_len=5), spec_verify_ct=0,
        spec_num_correct_drafts=0, update_spec_correct_drafts_histogram=lambda n: None,
    )


reqs = [request(True), request(False)]
processor = object.__new__(Processor)
for name, value in {  # it is frozen
    "metrics_reporter": SimpleNamespace(snapshot_spec_decode_metrics=lambda *_: None),
    "model_worker": SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None),
}.items():
    object.__setattr__(processor, name, value)
for req in reqs:  # a prefill has given each its first token
    processor._maybe_collect_customized_info(0, req, None)
result = StepResult(
    logits_output=None, next_token_ids=torch.tensor([7, 8, 9, 6, 0, 0]),
    accept_lens=torch.tensor([3, 1], dtype=torch.int32), speculative_output_stride=3,
    relaxed=torch.tensor([[False, True, False], [False] * 3]),
)
result.num_non_draft_tokens_per_req = 1
runs = processor._resolve_spec_v2_tokens(result, SimpleNamespace(reqs=reqs, has_grammar=False))
assert runs == [[7, 8, 9], [6]], runs
for req, run in zip(reqs, runs):
    req.output_ids += run
    processor._maybe_collect_customized_info(0, req, SimpleNamespace(customized_info=None))
assert reqs[0].customized_info == {"relaxed_tokens": [0, 0, 1, 0]}, reqs[0].customized_info
assert reqs[1].customized_info is None

manager = object.__new__(TokenizerManager)
told = []
for index in range(2):
    state = SimpleNamespace(
        output_ids=[], customized_info_accumulated={}, customized_info_reported_keys=set()
    )
    told.append({})
    info = {"relaxed_tokens": [[0, 0, 1, 0], [None, None]]}
    manager.update_request_meta_info(told[-1], state, info, index, None)
assert told == [{"relaxed_tokens": [0, 0, 1, 0]}, {}], told
print("told")
"""


def test_marks_pass_sglangs_scheduler_and_http_process():
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout.strip().endswith("told"), run.stderr[-3000:]
