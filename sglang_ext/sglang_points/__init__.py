"""Every place of SGLang that we hook, assign or extend, so that an upgrade is a diff of this file.

Whoever hooks something takes its point from here and gives it to `hooking.hook` (or `assign`),
which take no other. `python -m scripts.sglang_points --write` makes docs/sglang-points.md of it.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sglang_ext.sglang_points import sources

# The versions whose every point was tried; pyproject.toml pins the same.
SUPPORTED = ("0.5.23",)


class How(StrEnum):
    """What we do at a point; the first three are kinds of SGLang's HookType."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    ASSIGNED = "assigned"
    CALLED = "called"
    SUBCLASSED = "subclassed"
    OVERRIDDEN = "overridden"
    INSTANCE = "instance"
    TORCH = "torch"


@dataclass(frozen=True)
class Point:
    """A place of SGLang that we depend on beyond calling it.

    Attributes:
        target: its dotted name, the module's included.
        how: what we do there.
        by: our module that does it, below sglang_ext.
        why: the reason, in a line.
        takes: parameters that our function relies on: its first ones by position, behind `*`
            those that may stand anywhere.
        cpu: only where there is no GPU.
    """

    target: str
    how: How
    by: str
    why: str
    takes: str = ""
    cpu: bool = False


_SRT = "sglang.srt."
_ALGO = _SRT + "speculative.spec_registry.CustomSpecAlgo"
_OPENAI = _SRT + "entrypoints.openai."
_GRAMMAR = _SRT + "constrained.xgrammar_backend.XGrammarGrammar"
_UNQUANT = _SRT + "layers.quantization.unquant."
_UPDATER = _SRT + "model_executor.model_runner_components.weight_updater.WeightUpdater."
_RUNNER = _SRT + "model_executor.model_runner.ModelRunner."
_WHISPER = _SRT + "models.whisper.WhisperForConditionalGeneration"
_CORPUS = _SRT + "managers.tokenizer_control_mixin."
_MASKS = "tree masks that are right there"

# The algorithm and its worker.
ALGORITHM = Point(
    _SRT + "speculative.spec_info.SpeculativeAlgorithm.register", How.CALLED, "plugin",
    "the algorithm SSSD", takes="cls, name, *, supports_overlap, spec_class",
)  # fmt: skip
SPEC_ALGO = Point(
    _ALGO, How.SUBCLASSED, "plugin", "trees drafted on the host, without KV of drafts"
)
SERVER_ARGS = Point(
    _ALGO + ".handle_server_args", How.OVERRIDDEN, "plugin",
    "the server flags that the algorithm needs", takes="self, server_args",
)  # fmt: skip
HANDOFF = Point(
    _ALGO + ".build_disagg_draft_input", How.OVERRIDDEN, "disaggregation/handoff",
    "what a decode server's first step starts from",
    takes="self, batch, last_tokens_tensor, future_map",
)  # fmt: skip
WORKER = Point(
    _SRT + "speculative.base_spec_worker.BaseSpecWorker", How.SUBCLASSED, "worker",
    "the contract of a speculative worker",
)  # fmt: skip
STEP_RESULT = Point(
    _SRT + "managers.utils.GenerationBatchResult", How.SUBCLASSED, "step/step_result",
    "what the scheduler reads of a step, and what a device's step leaves to be learned",
)  # fmt: skip
REQUEST_ROWS = Point(
    _SRT + "mem_cache.allocation_sizing.get_req_to_token_extra_context_len", How.AROUND, "plugin",
    "request rows get room for the slots that a decode step reserves past the context's end",
)  # fmt: skip

# The HTTP process.
CUSTOM_PARAMS = Point(
    _SRT + "sampling.sampling_params.SamplingParams.verify", How.AFTER, "plugin",
    "wrong `custom_params` are a 400; the namespace header gets into them", takes="self",
)  # fmt: skip
CORPUS_SPEC = Point(
    _CORPUS + "get_spec", How.ASSIGNED, "plugin",
    "the corpus routes look for the name NGRAM. Not by the registry: it would replace `get_spec` "
    "in every module that imports it",
)  # fmt: skip
ADD_CORPUS = Point(
    _CORPUS + "TokenizerControlMixin.add_external_corpus", How.ASSIGNED, "plugin",
    "SGLang tokenizes a corpus on the event loop", takes="self, obj",
)  # fmt: skip
PROCESSES = Point(
    _SRT + "entrypoints.engine.mp", How.ASSIGNED, "cpu/fork_server",
    "the scheduler and the detokenizer are forked from one process that has imported SGLang",
    cpu=True,
)  # fmt: skip
HTTP_SERVER = Point(
    _SRT + "entrypoints.http_server._setup_and_run_http_server", How.BEFORE, "plugin",
    "our routes and middleware join SGLang's FastAPI application; of a Whisper, /v1/realtime and "
    "the audio routes stand before SGLang's own", takes="server_args",
)  # fmt: skip
PAGE_AUTH = Point(
    _SRT + "utils.auth.decide_request_auth", How.AROUND, "plugin",
    "the page /captions holds no secret, and a browser sends no key for it",
    takes="*, method, path",
)  # fmt: skip
UVICORN = Point(
    "uvicorn.config.Config.__init__", How.BEFORE, "plugin", "bounds on WebSocket messages",
    takes="*, ws_max_size, ws_max_queue, ws_per_message_deflate",
)  # fmt: skip
NORMALIZE = tuple(
    Point(
        f"{_SRT}managers.io_struct.{name}.normalize_batch_and_arguments", How.AROUND,
        "admission/hooks", "requests that would end a scheduler are refused", takes="self",
    )
    for name in ("GenerateReqInput", "EmbeddingReqInput")
)  # fmt: skip
TOKENIZED = Point(
    _SRT + "managers.tokenizer_manager.TokenizerManager._create_tokenized_object", How.AROUND,
    "admission/hooks", "the same, for what is known only with the tokens", takes="self, obj",
)  # fmt: skip
# Each turns a body into SGLang's request, and depends on nothing but the body.
CONVERSIONS = tuple(
    Point(
        f"{_OPENAI}{name}._convert_to_internal_request", How.AROUND,
        "admission/hooks", "messages that cannot be rendered are a 400", takes="self, request",
    )
    for name in (
        "serving_chat.OpenAIServingChat", "serving_completions.OpenAIServingCompletion",
        "serving_embedding.OpenAIServingEmbedding", "serving_classify.OpenAIServingClassify",
        "serving_rerank.OpenAIServingRerank", "serving_score.OpenAIServingScore",
    )
)  # fmt: skip
ANSWER = Point(
    _OPENAI + "serving_base.OpenAIServingBase.handle_request", How.AROUND,
    "api/predicted_outputs",
    "`prediction` of chat completions, which SGLang's models of request and answer do not have",
    takes="self, request, raw_request",
)  # fmt: skip

# Grammars.
VOCAB_MASK = Point(
    _GRAMMAR + ".apply_vocab_mask", How.AROUND, "admission/grammars",
    "where a grammar allows no token, something is sampled still", takes="self, logits, vocab_mask",
)  # fmt: skip
ACCEPT_TOKEN = Point(
    _GRAMMAR + ".accept_token", How.AROUND, "admission/grammars",
    "and that token is refused as a dead end", takes="self, token",
)  # fmt: skip
ABORT = Point(
    _SRT + "managers.schedule_batch.FINISH_ABORT.__init__", How.AROUND, "admission/grammars",
    "a dead end is the client's error", takes="self, message, status_code, err_type",
)  # fmt: skip
COMPILER = Point(
    _GRAMMAR + "Backend.__init__", How.AFTER, "admission/grammar_cache",
    "xgrammar's cache of compiled grammars is bounded", takes="self",
)  # fmt: skip
GRAMMAR_CACHE = Point(
    _SRT + "constrained.base_grammar_backend.BaseGrammarBackend.set_cache", How.AFTER,
    "admission/grammar_cache", "and so is SGLang's own", takes="self",
)  # fmt: skip

# Whisper.
PROCESSOR_CLASS = Point(
    _SRT + "managers.multimodal_processor.get_mm_processor_cls", How.AROUND,
    "whisper/audio_processor",
    "Whisper's processor: prompts, languages, decoding off the event loop", takes="hf_config",
)  # fmt: skip
PROCESSOR = Point(
    _SRT + "multimodal.processors.base_processor.BaseMultimodalProcessor", How.SUBCLASSED,
    "whisper/audio_processor", "the same",
)  # fmt: skip
LOAD_WHISPER = Point(
    _WHISPER + ".load_weights", How.BEFORE, "whisper/encoder_decoder",
    "key biases that SGLang leaves uninitialised are zeroed, and modules without a part in decode "
    "steps are marked", takes="self",
)  # fmt: skip
ENCODER_TOKENS = Point(
    _WHISPER + ".pad_input_ids", How.AROUND, "whisper/audio_context",
    "fewer frames than a whole window's are encoded where a request says so",
    takes="self, input_ids, mm_inputs",
)  # fmt: skip
ENCODE = Point(
    _WHISPER + ".forward", How.AROUND, "whisper/audio_context",
    "and requests of several lengths are encoded in one prefill",
    takes="self, input_ids, positions, forward_batch",
)  # fmt: skip
ENCODER = Point(
    _SRT + "models.whisper.WhisperEncoder.forward", How.AROUND, "cpu/whisper_encoder",
    "each request is encoded by itself, so that its states do not depend on others",
    takes="self, input_features, position_ids, forward_batch", cpu=True,
)  # fmt: skip
ENCODER_LAYER = Point(
    _SRT + "models.whisper.WhisperEncoderLayer.forward", How.AROUND, "cpu/whisper_encoder",
    "the encoder's layers in bfloat16, where weights have 8 or 4 bits",
    takes="self, hidden_states, forward_batch", cpu=True,
)  # fmt: skip
PREBUILT = Point(
    _SRT + "disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin"
    ".prepare_for_prebuilt", How.AFTER, "whisper/encoder_decoder",
    "encoder tokens are parted from decoder tokens on decode servers", takes="self",
)  # fmt: skip

# Schedulers and models.
COMMITTED_TOKENS = Point(
    _SRT + "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._resolve_spec_v2_tokens", How.AFTER, "step/relaxed_info",
    "`meta_info` says which tokens were accepted by relaxation", takes="self, result, batch",
)  # fmt: skip
COLLECTED_INFO = Point(
    _SRT + "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._maybe_collect_customized_info", How.AFTER, "step/relaxed_info",
    "and of a prefill's token that it was not", takes="self, i, req, logits_output",
)  # fmt: skip
META_INFO = Point(
    _SRT + "managers.tokenizer_manager.TokenizerManager.update_request_meta_info", How.AROUND,
    "step/token_info", "SGLang gives what one request is told to all that are sent with it",
    takes="self, meta_info, state, customized_info, index, finish_reason",
)  # fmt: skip
ARRIVAL = Point(
    _SRT + "disaggregation.decode.DecodePreallocQueue.add", How.AFTER, "disaggregation/arrivals",
    "drafting of a request begins when it arrives", takes="self, req, is_retracted, is_rebootstrap",
)  # fmt: skip
INSTANCES = (
    Point(
        _SRT + "layers.attention.flashinfer_backend.FlashInferIndicesUpdaterPrefill.update",
        How.INSTANCE, "cuda/encoder_tokens", _MASKS + ", beside an encoder",
    ),
    Point(
        _SRT + "layers.attention.flashinfer_backend.FlashInferAttnBackend._create_prefill_wrappers",
        How.INSTANCE, "cuda/encoder_tokens", _MASKS + ", beside an encoder",
        takes="self, bs, use_custom_mask",
    ),
    *(
        Point(
            f"{_SRT}layers.attention.triton_backend.TritonAttnBackend.{name}",
            How.INSTANCE, "cuda/windows", _MASKS + ", in sliding windows",
        )
        for name in (
            "extend_attention_fwd", "init_forward_metadata", "init_forward_metadata_out_graph"
        )
    ),
    *(
        Point(_RUNNER + name, How.INSTANCE, "cuda/graphs", "for a step: a graph set for each width")
        for name in ("attn_backend", "decode_cuda_graph_runner")
    ),
    Point(
        _SRT + "layers.logits_processor.LogitsProcessor.forward", How.TORCH, "cuda/prefill",
        "logits of drafts behind prompts", takes="*, hidden_states, logits_metadata",
    ),
    Point(
        _WHISPER + ".decoder", How.TORCH, "whisper/encoder_decoder",
        "the decoder's share of a prefill's time",
    ),
    *(
        Point(
            f"{_SRT}models.{name}DecoderLayer.forward", How.TORCH, "mirror/target_parts",
            "the state at the early exit; other models alike, where their layers have it",
            takes="*, capture_output",
        )
        for name in ("llama.Llama", "qwen2.Qwen2")
    ),
    Point(
        _SRT + "models.llama.LlamaModel.norm", How.TORCH, "mirror/target_parts",
        "the final states that a lens is fitted to; other models' final norms alike",
    ),
    Point(
        _RUNNER + "sampler", How.TORCH, "step/logits_guard", "logits that cannot be sampled"
    ),
)  # fmt: skip

# Without a GPU.
TREE_BACKEND = Point(
    _SRT + "layers.attention.attention_registry.register_attention_backend", How.CALLED,
    "cpu/attention", "attention under tree masks: `tree_cpu`", takes="name", cpu=True,
)  # fmt: skip
BACKEND_CHOICE = Point(
    _SRT + "server_args.add_attention_backend_choices", How.CALLED, "cpu/attention",
    "`--attention-backend tree_cpu`", cpu=True,
)  # fmt: skip
ATTENTION = Point(
    _SRT + "layers.attention.base_attn_backend.AttentionBackend", How.SUBCLASSED, "cpu/attention",
    "attention under tree masks", cpu=True,
)  # fmt: skip
LINEAR, HEAD = (
    Point(
        f"{_UNQUANT}{name}.process_weights_after_loading", How.AFTER, "cpu/linear",
        "weights packed once", takes="self, layer", cpu=True,
    )
    for name in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
)  # fmt: skip
PACKED = tuple(
    Point(_UNQUANT + name, How.SUBCLASSED, "cpu/linear", "products with these", cpu=True)
    for name in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
)
WEIGHT_UPDATES = tuple(
    Point(
        _UPDATER + name, How.AFTER, "cpu/linear", "weights that change are packed anew", cpu=True
    )
    for name in (
        "load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc"
    )
)  # fmt: skip
CHECK_WEIGHTS = Point(
    _RUNNER + "check_weights", How.BEFORE, "cpu/linear",
    "refused where layers keep packed weights alone", takes="self", cpu=True,
)  # fmt: skip
ROTARY = Point(
    _SRT + "layers.rotary_embedding.base.RotaryEmbedding.forward_native", How.AROUND, "cpu/rotary",
    "one compiled pass",
    takes="self, positions, query, key, offsets, fused_set_kv_buffer_arg", cpu=True,
)  # fmt: skip
STORE_KV = Point(
    _SRT + "mem_cache.memory_pool._set_kv_buffer_impl", How.AROUND, "cpu/kv_store",
    "K and V stored by `index_copy_`", takes="k, v, k_cache, v_cache, indices", cpu=True,
)  # fmt: skip
SAMPLER = Point(
    _SRT + "layers.sampler.Sampler.forward", How.AROUND, "cpu/greedy_sampler",
    "greedy tokens by NumPy's argmax", cpu=True,
    takes="self, logits_output, sampling_info, return_logprob, *, logprob_logits",
)  # fmt: skip
KV_POOL = Point(
    _SRT + "mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal", How.AFTER,
    "cpu/kv_pool", "its memory is taken as tokens come", takes="self", cpu=True,
)  # fmt: skip
KV_CLASS = Point(
    _SRT + "disaggregation.utils.get_kv_class", How.AFTER, "disaggregation/on_cpu",
    "KV over TCP from plain memory", takes="transfer_backend, class_type", cpu=True,
)  # fmt: skip
ON_IDLE = Point(
    _SRT + "managers.scheduler.Scheduler.on_idle", How.AFTER, "disaggregation/on_cpu",
    "waiting for KV without spinning", takes="self", cpu=True,
)  # fmt: skip
TRANSFER = Point(
    _SRT + "distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine"
    ".batch_transfer_sync", How.AROUND, "disaggregation/on_cpu",
    "KV in parts that fit Mooncake's queue",
    takes="self, session_id, buffers, peer_buffer_addresses, lengths", cpu=True,
)  # fmt: skip

POINTS = tuple(
    point
    for value in tuple(globals().values())
    for point in (value if isinstance(value, tuple) else (value,))
    if isinstance(point, Point)
)


def unresolved(folder: Path | None = None) -> list[str]:
    """Points that SGLang's sources do not have, or with other parameters; nothing is imported.

    Args:
        folder: where `sglang/` lies; by default the installed packages. Points of other packages
            are always looked for among those.

    Returns:
        "TARGET: what is wrong" for each, in the order of the list.
    """
    found = ((p.target, sources.problem(p.target, p.takes, folder)) for p in POINTS)
    return [f"{target}: {wrong}" for target, wrong in found if wrong]
