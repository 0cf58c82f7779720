"""What SGLang calls in every process at start (entry-point group `sglang.srt.plugins`)."""

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from sglang_ext import sglang_points
from sglang_ext.options import Options
from sglang_ext.servers.flag_names import ALGORITHM
from sglang_ext.sglang_points.hooking import assign, hook, refusal
from sglang_ext.whisper import audio_processor

logger = logging.getLogger(__name__)

# Root included; on a CPU, past this the forward pass costs more than it can gain.
DEFAULT_DRAFT_TOKENS = 16
# Whole utterances and sentences are drafted, with branches beside them.
DEFAULT_LONG_DRAFT_TOKENS = 32
LONG_DRAFTERS = frozenset({"specasr", "ssbd"})
MAX_DRAFT_TOKENS = 64
# As SGLang's NGRAM: what a verify step of that many trees still pays for.
MAX_RUNNING_REQUESTS = 48
# Messages of one WebSocket that uvicorn holds before it stops reading.
_WEBSOCKET_QUEUE = 4

# Set by api/app.py where uvicorn's workers load it.
in_http_worker = False


def register() -> None:
    """Register the speculative algorithm, the CPU backend and the request checks.

    With an SGLang that we do not support, nothing is registered, and one line says so.

    Raises:
        SystemExit: the command line asks for our algorithm then. SGLang would only log another
            exception, and end a moment later with an error that tells nothing of this.
    """
    refused = refusal()
    if refused is not None:
        if _asks_for_us(sys.argv):
            raise SystemExit(refused)
        logger.error(refused)
        return
    _register()


def _asks_for_us(argv: Sequence[str]) -> bool:
    """Whether a command line names our algorithm, however SGLang would read it."""
    return any(a.rpartition("=")[2].upper() == ALGORITHM for a in argv)


def _register() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ext.cpu.install import wants_cpu_engine
    from sglang_ext.whisper import encoder_decoder

    SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, spec_class=_host_drafted_algorithm()
    )(_worker_class)
    encoder_decoder.register()
    if wants_cpu_engine():
        from sglang_ext import cpu

        cpu.register()
    _check_request_options()
    from sglang_ext.admission import grammar_cache, grammars

    grammars.register(_is_ours)
    grammar_cache.register(_is_ours, lambda: Options.from_env().grammar_cache_mb)
    if multiprocessing.parent_process() is None or in_http_worker:
        from sglang_ext.admission import hooks as admission
        from sglang_ext.api import predicted_outputs
        from sglang_ext.step import token_info

        admission.register(_is_ours)
        predicted_outputs.register(_is_ours)
        token_info.register()
    _open_corpus_endpoints()
    _widen_request_rows()
    audio_processor.register()
    if multiprocessing.parent_process() is None:
        _add_routes()


def _worker_class(server_args: Any) -> type:
    from sglang_ext.worker import SpeculativeWorker

    return SpeculativeWorker


def _host_drafted_algorithm() -> type:
    """A CustomSpecAlgo that SGLang treats as NGRAM: trees drafted on the host, no draft KV."""
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class HostDraftedAlgorithm(CustomSpecAlgo):
        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def create_future_map(self, device, req_to_token_pool, *args: Any, **kwargs: Any):
            from sglang.srt.managers.overlap_utils import FutureMap

            return FutureMap(device, self, req_to_token_pool, *args, **kwargs)

        def build_disagg_draft_input(self, batch: Any, last_tokens_tensor, future_map: Any):
            from sglang_ext.disaggregation.handoff import first_draft_input

            return first_draft_input(batch, last_tokens_tensor, future_map)

        def handle_server_args(self, server_args: Any) -> None:
            _resolve_server_args(server_args)

    return HostDraftedAlgorithm


def _resolve_server_args(server_args: Any) -> None:
    """Fill in what the algorithm needs, as arg_groups/speculative_hook.py does for NGRAM.

    Raises:
        ValueError: a flag that it cannot work with.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_ext.api.datastore import protocol
    from sglang_ext.api.datastore.shared_ranks import share_among_ranks
    from sglang_ext.cuda import backends
    from sglang_ext.whisper.cross_attention import tells_frames

    options = Options.from_env()  # a wrong value ends the start here, with one clear line
    protocol.make_folder()
    cfg = resolving_view(server_args)
    if cfg.device not in ("cuda", "cpu"):
        raise ValueError(f"{ALGORITHM} runs on cuda and cpu, not on --device {cfg.device}")
    if cfg.pp_size > 1:
        raise ValueError(f"{ALGORITHM} does not support pipeline parallelism (--pp-size 1)")
    if cfg.attn_dp_size > 1:
        raise ValueError(f"{ALGORITHM} does not support --enable-dp-attention")
    share_among_ranks(cfg.dp_size)
    if cfg.enable_lmcache:  # SGLang's own message names neither the flag nor the algorithm
        raise ValueError(f"{ALGORITHM} does not support --enable-lmcache; leave it out")
    long = options.default_drafter in LONG_DRAFTERS or "specasr" in options.loaded_drafters()
    default = DEFAULT_LONG_DRAFT_TOKENS if long else DEFAULT_DRAFT_TOKENS
    width = cfg.speculative_num_draft_tokens or default
    if not 2 <= width <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"--speculative-num-draft-tokens {width}: expected 2 to {MAX_DRAFT_TOKENS} "
            "(the root included)"
        )
    # SGLang hands plugins a stand-in of its arguments that records what is assigned.
    server_args.speculative_num_draft_tokens = width
    # With topk 1, attention backends take the nodes for a chain and leave the mask out.
    server_args.speculative_eagle_topk = 2
    server_args.speculative_num_steps = width // 2
    server_args.enable_mixed_chunk = False
    if cfg.max_running_requests is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
    if options.live_policy == "alignatt" and not tells_frames(cfg):
        raise ValueError(
            "--live-policy alignatt reads Whisper's attention, which --attention-backend tree_cpu "
            "on a CPU shows, with --tp-size 1; leave it out or give localagreement"
        )
    if cfg.device == "cpu":
        server_args.disable_overlap_schedule = True
    else:
        backends.resolve_backends(server_args)


def _check_request_options() -> None:
    """Refuse bad custom_params where a client gets a 400 for it, before the scheduler sees it."""
    from sglang_ext.admission.relaxed_rules import check_relaxed
    from sglang_ext.admission.sampling_params import check_custom_params
    from sglang_ext.api.namespaces import with_header
    from sglang_ext.drafters import load_class
    from sglang_ext.request_options import RequestOptions, flattened

    @cache
    def options() -> Options:
        return Options.from_env()

    @cache
    def drafters_checks() -> list[Any]:
        return [load_class(name).check for name in options().loaded_drafters()]

    def verify(_result: None, params: Any, *_args: Any, **_kwargs: Any) -> None:
        if not _is_ours():
            return
        check_custom_params(params.custom_params)
        given = flattened(params.custom_params)
        params.custom_params = with_header(given, options().namespace_header)
        if params.custom_params:
            asked = RequestOptions.parse(params.custom_params, options().loaded_drafters())
            check_relaxed(asked, params, options())
            for check in drafters_checks():
                check(params.custom_params)

    hook(sglang_points.CUSTOM_PARAMS, verify)


def _is_ours() -> bool:
    """Whether this server speculates with our algorithm."""
    from sglang.srt.runtime_context import get_spec

    return bool(get_spec().speculative_algorithm == ALGORITHM)


def _open_corpus_endpoints() -> None:
    """Let SGLang's corpus endpoints serve our algorithm: they look for the name NGRAM."""
    assign(sglang_points.CORPUS_SPEC, _spec_as_ngram)
    assign(sglang_points.ADD_CORPUS, _add_corpus)


def _spec_as_ngram(original: Callable[[], Any]) -> Callable[[], Any]:
    def get_spec() -> Any:
        spec = original()
        return _AsNgram(spec) if spec.speculative_algorithm == ALGORITHM else spec

    return get_spec


def _add_corpus(original: Callable[..., Any]) -> Callable[..., Any]:
    async def add_external_corpus(manager: Any, request: Any) -> Any:
        from sglang.srt.runtime_context import get_spec

        spec = get_spec()
        if spec.speculative_algorithm != ALGORITHM:
            return await original(manager, request)
        from sglang_ext.api.datastore import corpora

        limit = spec.speculative_ngram_external_corpus_max_tokens
        return await corpora.add_external_corpus(manager.tokenizer, request, limit)

    return add_external_corpus


def _add_routes() -> None:
    """Our HTTP routes, in the process that serves HTTP and if it serves this algorithm."""

    def extend(server_args: Any, *_args: Any, **_kwargs: Any) -> None:
        from sglang.srt.entrypoints.http_server import app as served

        from sglang_ext.extras import is_installed

        if is_installed("speech"):
            from sglang_ext.api.realtime import captions_page, realtime_route
            from sglang_ext.api.transcription import transcriptions

            transcriptions.register(served)
            realtime_route.register(served)
            captions_page.register(served)
        if server_args.speculative_algorithm != ALGORITHM:
            return
        from sglang_ext.api import app

        app.extend(served, Options.from_env().namespace_header)
        os.environ.setdefault("SGLANG_HTTP_SERVER_APP_PATH", app.APP_PATH)

    def bounded(*args: Any, **settings: Any) -> tuple[Any, Any]:
        """Messages are held in memory: their size is bounded, as sent and as inflated."""
        if not _is_ours():
            return args, settings
        settings["ws_max_size"] = Options.from_env().websocket_message_kb << 10
        settings["ws_max_queue"] = _WEBSOCKET_QUEUE
        settings["ws_per_message_deflate"] = False
        return args, settings

    def let_page_in(original: Callable[..., Any], **request: Any) -> Any:
        from sglang_ext.extras import is_installed

        if is_installed("speech"):
            from sglang_ext.api.realtime import captions_page

            return captions_page.let_in(original, **request)
        return original(**request)

    hook(sglang_points.HTTP_SERVER, extend)
    hook(sglang_points.PAGE_AUTH, let_page_in)
    hook(sglang_points.UVICORN, bounded)


class _AsNgram:
    """SGLang's speculative settings under the name NGRAM."""

    speculative_algorithm = "NGRAM"

    def __init__(self, spec: Any):
        self._spec = spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)


def _widen_request_rows() -> None:
    """Give request rows room for the slots that a decode step reserves past the context's end.

    SGLang 0.5.23 reserves twice the draft tokens (mem_cache/allocation_sizing.py) but widens the
    rows by those tokens once: at the end of the context, slots would be written past the row.
    """

    def widened(original: Any) -> int:
        from sglang.srt.mem_cache.allocation_sizing import (
            get_alloc_page_size,
            get_alloc_reserve_per_decode,
        )

        return max(original(), 4 + get_alloc_reserve_per_decode() + get_alloc_page_size())

    hook(sglang_points.REQUEST_ROWS, widened)
