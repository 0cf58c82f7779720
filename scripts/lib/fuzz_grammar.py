"""The requests of a server's fuzzer: for each class of routes, bodies that are nearly right.

A body starts valid and short; some of its fields are then given values of the wrong type, out of
bounds, huge, nested or odd, and fields of other routes or names that nobody knows may join it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

JSON = "application/json"
VOCABULARY = 49_152  # of SmolLM2; the bounds of others are covered by the huge values


@dataclass(frozen=True)
class FuzzRequest:
    """One request.

    Attributes:
        kind: its class.
        body: JSON, or text as it is; None: no body.
        messages: of a WebSocket to a new translation session, instead of a body.
    """

    kind: str
    method: str
    path: str
    body: Any = None
    content_type: str = JSON
    messages: tuple[Any, ...] = ()

    def record(self, number: int) -> dict[str, Any]:
        """What a file of failures says of it."""
        return {"number": number, **vars(self)}  # asdict copies bodies too deep for it


def _nested(depth: int, inner: Any) -> Any:
    for i in range(depth):
        inner = {"a": inner} if i % 2 else [inner]
    return inner


_NUMBERS = st.sampled_from(
    [0, 1, 2, 3, -1, -2, -5, 7, 64, 127, 128, 129, 1000, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1,
     1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32, 1 << 62, 1 << 63, 1 << 64, 10**30, 10**300]
)  # fmt: skip
_FLOATS = st.sampled_from(
    [0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -1.0, 1e-7, 1e-30, 5e-324, 1e30, 1e38, 1e39, 1e308,
     float("nan"), float("inf"), float("-inf")]
)  # fmt: skip
_TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "\0", "\ud800", "a\udfffb", "x" * 600, "é" * 300, "../../etc/passwd", "null", "1",
         "{}", "[]", "%s%n", "\n\r", "{{7*7}}", "-1", "none", "<|im_start|>", "a" * 20_000]
    ),
    st.text(max_size=12),
)  # fmt: skip
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _FLOATS, _TEXTS)
JUNK = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=4),
    st.dictionaries(_TEXTS, _SCALARS, max_size=3),
    st.builds(_nested, st.sampled_from([1, 3, 40, 150, 900]), st.just(1)),
)
_IDS = st.lists(st.one_of(_NUMBERS, st.integers(0, VOCABULARY - 1)), max_size=5)

_REGEX = st.sampled_from(
    ["a", "(a+)+b", ".*.*.*x", "(a|a)*c", "[", "(?P<n>a)(?P=n)", "a{100000}", "(" * 80 + ")" * 80,
     r"\d{2,3}", "(?=a)", "a" * 300, "((a{1,99}){1,99}){1,99}"]
)  # fmt: skip
_SCHEMAS = st.sampled_from(
    ["{}", "[]", "5", "null", '{"$ref":"#"}', '{"type":"object"}', '{"type":"nothing"}', "{",
     '{"type":"integer"}', '{"type":"string","maxLength":4}', '{"enum":[]}', "$$ANY$$",
     '{"anyOf":[]}', '{"type":"array","minItems":-1}', '{"a":' * 90 + "1" + "}" * 90]
)  # fmt: skip
_GRAMMAR = st.sampled_from(
    ['root ::= "a"', "root ::= root", "root", "", 'root ::= ("" | "a")*', 'root ::= "a" b\nb ::= b',
     'root ::= [^\\x00-\\U0010ffff]', "root ::= root root | root"]
)  # fmt: skip
_TAGS = st.sampled_from(["{}", "[]", "1", '{"structures":[],"triggers":[]}', '{"format":{}}'])

SAMPLING: dict[str, Any] = {
    "max_new_tokens": st.one_of(st.integers(0, 6), _NUMBERS),
    "min_new_tokens": st.one_of(st.integers(0, 4), _NUMBERS),
    "temperature": _FLOATS, "top_p": _FLOATS, "top_k": _NUMBERS, "min_p": _FLOATS,
    "frequency_penalty": _FLOATS, "presence_penalty": _FLOATS, "repetition_penalty": _FLOATS,
    "stop": st.one_of(_TEXTS, st.lists(_TEXTS, max_size=40)), "stop_token_ids": _IDS,
    "stop_regex": _REGEX, "n": st.one_of(st.integers(1, 3), _NUMBERS), "beam_width": _NUMBERS,
    "json_schema": _SCHEMAS, "regex": _REGEX, "ebnf": _GRAMMAR, "structural_tag": _TAGS,
    "ignore_eos": st.booleans(), "skip_special_tokens": JUNK, "no_stop_trim": JUNK,
    "spaces_between_special_tokens": JUNK, "stream_interval": _NUMBERS, "sampling_seed": _NUMBERS,
    "logit_bias": st.dictionaries(_NUMBERS.map(str) | _TEXTS, _FLOATS, max_size=4),
    "watermark": JUNK, "is_normalized": JUNK, "stop_strs": JUNK, "unknown_field": JUNK,
}  # fmt: skip
CUSTOM: dict[str, Any] = {
    "drafter": st.sampled_from(["sssd", "ssbd", "random", "none", "nobody"]) | JUNK,
    "draft_length": _NUMBERS, "budget": st.sampled_from(["auto", "fixed"]) | JUNK,
    "datastore": JUNK, "ingest": JUNK, "namespace": _TEXTS, "ingest_name": _TEXTS,
    "ssbd": st.fixed_dictionaries(
        {}, optional={"session": _TEXTS, "beta": _FLOATS, "draft": _IDS, "mask": _NUMBERS,
                      "trim": _NUMBERS, "realign": JUNK, "retrieve": JUNK}) | JUNK,
    "relaxed": st.fixed_dictionaries(
        {}, optional={"top_beta": _NUMBERS, "tau": _FLOATS, "by": JUNK, "x": JUNK}) | JUNK,
    "thinking_budget": JUNK, "__sglang_reasoning_end_token_ids": _IDS | JUNK, "x": JUNK,
}  # fmt: skip
_GENERATE: dict[str, Any] = {
    "rid": _TEXTS | st.lists(_TEXTS, max_size=3), "session_id": _TEXTS,
    "return_logprob": st.booleans(), "logprob_start_len": _NUMBERS, "top_logprobs_num": _NUMBERS,
    "token_ids_logprob": _IDS, "return_text_in_logprobs": st.booleans(), "stream": st.booleans(),
    "lora_path": _TEXTS | st.lists(_TEXTS, max_size=2), "extra_key": _TEXTS, "cache_salt": _TEXTS,
    "lora_id": _TEXTS | st.lists(_TEXTS, max_size=2), "session_params": JUNK, "priority": _NUMBERS,
    "custom_logit_processor": _TEXTS, "bootstrap_host": _TEXTS, "bootstrap_room": _NUMBERS,
    "bootstrap_port": _NUMBERS, "routed_dp_rank": _NUMBERS, "data_parallel_rank": _NUMBERS,
    "return_hidden_states": JUNK, "return_routed_experts": st.booleans(),
    "routed_experts_start_len": _NUMBERS, "return_sampling_mask": st.booleans(),
    "sampling_logprobs_mode": JUNK, "input_embeds": JUNK, "image_data": JUNK, "modalities": JUNK,
    "mm_hashes": JUNK, "video_data": JUNK, "positional_embed_overrides": JUNK, "kv_hints": JUNK,
    "max_thinking_tokens": _NUMBERS, "multi_item_delimiter_indices": _IDS,
    "token_indices_to_pool": _IDS, "return_flat_raw_top_logprobs": st.booleans(),
    "return_prompt_token_ids": st.booleans(), "http_worker_ipc": _TEXTS, "encoder_urls": JUNK,
    "num_items_assigned": JUNK, "need_wait_for_mm_inputs": JUNK, "return_entropy": st.booleans(),
    "custom_labels": JUNK, "received_time": _FLOATS, "conversation_id": _TEXTS,
    "external_trace_header": JUNK, "require_reasoning": st.booleans(), "watermark": JUNK,
    "return_indexer_topk": st.booleans(), "mm_processor_kwargs": JUNK, "log_metrics": JUNK,
    "background": JUNK, "no_logs": JUNK, "routing_key": _TEXTS, "return_bytes": JUNK,
}  # fmt: skip
# Of SGLang's sessions, which /open_session opens.
_SESSION_PARAMS = st.fixed_dictionaries(
    {"id": st.just("s")},
    optional={"rid": st.sampled_from(["r", "nobody"]), "offset": _NUMBERS,
              "replace": st.booleans(), "drop_previous_output": st.booleans()},
) | JUNK  # fmt: skip
_PROMPTS = st.one_of(
    st.sampled_from(["The sky is", "a", "", "\ud800"]), st.lists(_TEXTS, max_size=3), JUNK
)
_OPENAI: dict[str, Any] = {
    "max_tokens": _NUMBERS, "temperature": _FLOATS, "top_p": _FLOATS, "n": _NUMBERS,
    "stop": st.one_of(_TEXTS, st.lists(_TEXTS, max_size=40)), "stream": st.booleans(),
    "stream_options": JUNK, "presence_penalty": _FLOATS, "frequency_penalty": _FLOATS,
    "logit_bias": SAMPLING["logit_bias"], "seed": _NUMBERS, "user": _TEXTS, "top_k": _NUMBERS,
    "min_p": _FLOATS, "min_tokens": _NUMBERS, "regex": _REGEX, "ebnf": _GRAMMAR, "rid": _TEXTS,
    "json_schema": _SCHEMAS, "repetition_penalty": _FLOATS, "stop_token_ids": _IDS,
    "stop_regex": _REGEX, "ignore_eos": JUNK, "skip_special_tokens": JUNK, "lora_path": _TEXTS,
    "session_params": JUNK, "response_format": JUNK, "model": _TEXTS, "priority": _NUMBERS,
    "custom_logit_processor": _TEXTS, "return_hidden_states": JUNK, "extra_key": _TEXTS,
    "cache_salt": _TEXTS, "bootstrap_room": _NUMBERS, "custom_params": JUNK, "beam_width": _NUMBERS,
    "return_token_ids": JUNK, "prompt_logprobs": _NUMBERS, "best_of": _NUMBERS, "echo": JUNK,
}  # fmt: skip
_MESSAGES = st.one_of(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool", "nobody", ""]),
             "content": st.one_of(_TEXTS, JUNK)},
            optional={"name": _TEXTS, "tool_calls": JUNK, "tool_call_id": _TEXTS}), max_size=3),
    JUNK,
)  # fmt: skip
_SCHEMA_OBJECT = st.one_of(JUNK, st.just({"type": "object", "properties": {"a": {"$ref": "#"}}}))
_TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"),
         "function": st.fixed_dictionaries({"name": _TEXTS}, optional={
             "parameters": _SCHEMA_OBJECT, "description": JUNK, "strict": JUNK})}), max_size=2
) | JUNK  # fmt: skip


@st.composite
def mutated(draw: Any, base: dict[str, Any], fields: dict[str, Any], most: int = 4) -> Any:
    """`base` with some fields of `fields` in it, a few of them junk, now and then one missing."""
    body = dict(base)
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True))
    for name in names:
        body[name] = draw(fields[name] if draw(st.integers(0, 3)) else JUNK)
    if body and draw(st.integers(0, 9)) == 0:
        body.pop(draw(st.sampled_from(sorted(body))))
    return body


def _posts(kind: str, path: str, bodies: Any) -> Any:
    return st.builds(lambda body: FuzzRequest(kind, "POST", path, body), bodies)


def _generate() -> Any:
    sampling = st.builds(
        lambda params, custom: params | ({"custom_params": custom} if custom else {}),
        mutated({"temperature": 0, "max_new_tokens": 4}, SAMPLING, 3),
        mutated({}, CUSTOM, 2) | JUNK,
    )
    prompt = st.one_of(
        st.just({"text": "The sky is"}),
        st.builds(lambda v: {"text": v}, _PROMPTS),
        st.builds(lambda v: {"input_ids": v}, _IDS | st.lists(_IDS, max_size=3) | JUNK),
    )
    return st.builds(
        lambda body, params, text: {**body, **text, "sampling_params": params},
        mutated({}, _GENERATE, 3),
        sampling | st.lists(sampling, max_size=2) | JUNK,
        prompt,
    )


def _one_odd(base: dict[str, Any], fields: dict[str, Any]) -> Any:
    """`base` with one field of `fields` in it and nothing else that is odd."""
    names = st.sampled_from(sorted(fields))
    return names.flatmap(
        lambda name: st.one_of(fields[name], JUNK).map(lambda value: base | {name: value})
    )


def _one_odd_of_generate() -> Any:
    """What is wrong with a single field is not refused for another."""
    ways = [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_k": 5}]
    samplings = [{"max_new_tokens": 4} | way for way in ways]
    bodies = [{"text": "The sky is", "sampling_params": sampling} for sampling in samplings]
    customs = st.sampled_from(samplings).flatmap(
        lambda params: _one_odd({}, CUSTOM).map(lambda c: params | {"custom_params": c})
    )
    odd = st.sampled_from(samplings).flatmap(lambda params: _one_odd(params, SAMPLING))
    return st.one_of(
        st.sampled_from(bodies).flatmap(lambda body: _one_odd(body, _GENERATE)),
        st.one_of(odd, odd, customs).map(lambda p: {"text": "The sky is", "sampling_params": p}),
    )


def _translation() -> Any:
    fields: dict[str, Any] = {
        "source_language": _TEXTS, "target_language": _TEXTS, "template": _TEXTS, "beta": _FLOATS,
        "mask": _NUMBERS, "trim_draft": _NUMBERS, "temperature": _FLOATS, "max_tokens": _NUMBERS,
        "seed": _NUMBERS, "metadata": JUNK, "model": _TEXTS, "realign": JUNK,
    }  # fmt: skip
    return mutated({"source_language": "en", "target_language": "fr", "max_tokens": 4}, fields)


def _updates() -> Any:
    fields = {"append": _TEXTS, "source": _TEXTS, "keep": _NUMBERS, "final": JUNK, "stream": JUNK,
              "finish": JUNK, "unknown": JUNK}  # fmt: skip
    return mutated({"append": "hello"}, fields) | JUNK


def _socket(messages: Any) -> Any:
    texts = st.one_of(messages, _TEXTS.map(lambda t: t.encode("utf-8", "replace").decode()))
    return st.builds(
        lambda m: FuzzRequest("websocket", "WS", "/v1/translation/sessions", messages=tuple(m)),
        st.lists(texts, min_size=1, max_size=5),
    )


def _raw() -> Any:
    paths = st.sampled_from(
        ["/generate", "/v1/chat/completions", "/v1/completions", "/add_external_corpus",
         "/remove_external_corpus", "/v1/translation/sessions", "/v1/messages", "/api/chat",
         "/datastore/flush", "/open_session", "/tokenize", "/v1/responses"]
    )  # fmt: skip
    bodies = st.one_of(
        st.sampled_from(
            ["", "{", "null", "[]", '"x"', "[" * 200, "[" * 100_000, '{"a":NaN}', "\0", "é",
             '{"text":"\\ud800"}', '{"a":1e999}', "{" + '"a":{' * 2000]
        ),
        st.text(max_size=30),
    )  # fmt: skip
    kinds = st.sampled_from([JSON, "text/plain", "", "multipart/form-data", "application/xml"])
    return st.builds(
        lambda method, path, body, kind: FuzzRequest("raw", method, path, body, kind),
        st.sampled_from(["POST", "PUT", "GET", "DELETE", "PATCH"]), paths, bodies, kinds,
    )  # fmt: skip


def _admin() -> Any:
    names = _TEXTS.map(lambda t: t.encode("utf-8", "replace").hex()[:200] or "x")
    corpus = mutated({"corpus_id": "c"}, {"corpus_id": _TEXTS, "documents": JUNK, "file_path": JUNK,
                                          "x": JUNK}) | JUNK  # fmt: skip
    simple = st.sampled_from(
        [("GET", "/datastore"), ("GET", "/datastore/namespaces"), ("POST", "/datastore/flush"),
         ("GET", "/list_external_corpora"), ("POST", "/datastore/flush?timeout=nan"),
         ("POST", "/datastore/flush?timeout=1e400"), ("GET", "/v1/models"), ("GET", "/server_info"),
         ("POST", "/flush_cache"), ("GET", "/model_info"), ("POST", "/flush_cache?timeout=inf"),
         ("GET", "/v1/models/%00"), ("GET", "/v1/responses/x"), ("POST", "/v1/responses/x/cancel"),
         ("GET", "/v1/loads"), ("GET", "/api/tags"), ("GET", "/metrics")]
    )  # fmt: skip
    return st.one_of(
        _posts("admin", "/add_external_corpus", corpus),
        _posts("admin", "/remove_external_corpus", corpus),
        _posts("admin", "/abort_request", mutated({"rid": "nobody"}, {"rid": JUNK, "x": JUNK})),
        simple.map(lambda pair: FuzzRequest("admin", *pair)),
        names.map(lambda n: FuzzRequest("admin", "DELETE", f"/datastore/requests/{n}")),
        names.map(lambda n: FuzzRequest("admin", "DELETE", f"/datastore/namespaces/fuzz{n}")),
    )


# Fields of requests, by the API that they are of.
_CHAT = _OPENAI | {
    "messages": _MESSAGES, "tools": _TOOLS, "tool_choice": JUNK, "logprobs": st.booleans(),
    "top_logprobs": _NUMBERS, "max_completion_tokens": _NUMBERS, "chat_template_kwargs": JUNK,
    "continue_final_message": JUNK, "separate_reasoning": JUNK, "reasoning_effort": JUNK,
}  # fmt: skip
_COMPLETION = _OPENAI | {
    "prompt": _PROMPTS | _IDS | st.lists(_IDS, max_size=2), "logprobs": _NUMBERS,
    "suffix": _TEXTS,
}  # fmt: skip
_CLAUDE = {"messages": _MESSAGES, "system": JUNK, "tools": JUNK, "tool_choice": JUNK,
           "temperature": _FLOATS, "top_k": _NUMBERS, "top_p": _FLOATS, "stream": st.booleans(),
           "max_tokens": _NUMBERS, "stop_sequences": JUNK, "thinking": JUNK,
           "metadata": JUNK}  # fmt: skip
_OLLAMA = {"messages": _MESSAGES, "prompt": JUNK, "options": JUNK, "stream": st.booleans(),
           "format": JUNK, "tools": JUNK, "think": JUNK, "raw": JUNK, "system": JUNK,
           "keep_alive": JUNK, "images": JUNK}  # fmt: skip
_RESPONSES = {"input": _MESSAGES | JUNK, "instructions": JUNK, "tools": JUNK,
              "temperature": _FLOATS, "stream": st.booleans(), "store": JUNK,
              "max_output_tokens": _NUMBERS, "reasoning": JUNK, "text": JUNK, "top_k": _NUMBERS,
              "previous_response_id": JUNK, "tool_choice": JUNK, "background": JUNK,
              "top_logprobs": _NUMBERS, "metadata": JUNK, "request_id": _TEXTS}  # fmt: skip
_OTHERS = {"input": _PROMPTS | _IDS, "prompt": JUNK, "tokens": _IDS | JUNK, "query": JUNK,
           "documents": JUNK, "items": JUNK, "label_token_ids": _IDS, "dimensions": _NUMBERS,
           "add_special_tokens": JUNK, "skip_special_tokens": JUNK, "encoding_format": JUNK,
           "apply_softmax": JUNK, "item_first": JUNK, "messages": _MESSAGES, "text": JUNK,
           "top_n": _NUMBERS}  # fmt: skip
_OTHER_PATHS = st.sampled_from(
    ["/v1/embeddings", "/encode", "/classify", "/v1/classify", "/tokenize", "/detokenize",
     "/v1/score", "/v1/rerank", "/v1/decisions", "/v1/systemone", "/api/show",
     "/parse_function_call", "/separate_reasoning"]
)  # fmt: skip
_SESSION = {"capacity_of_str_len": _NUMBERS, "session_id": _TEXTS, "streaming": JUNK,
            "timeout": _FLOATS}  # fmt: skip


def classes(model: str) -> dict[str, Any]:
    """Strategies of FuzzRequest by class.

    Args:
        model: the served name.
    """
    short = {"model": model, "max_tokens": 4, "temperature": 0}
    user = [{"role": "user", "content": "Hi"}]
    messages = mutated(short | {"messages": user}, _CLAUDE)
    return {
        "generate": _posts("generate", "/generate", _generate()),
        "one_odd": _posts("one_odd", "/generate", _one_odd_of_generate()),
        "one_odd_openai": _posts("one_odd_openai", "/v1/chat/completions", _one_odd(
            short | {"messages": user, "temperature": 1}, _CHAT))
        | _posts("one_odd_openai", "/v1/completions", _one_odd(
            short | {"prompt": "The sky", "temperature": 1}, _COMPLETION)),
        "completions": _posts(
            "completions", "/v1/completions", mutated(short | {"prompt": "The sky"}, _COMPLETION)
        ),
        "chat": _posts("chat", "/v1/chat/completions", mutated(short | {"messages": user}, _CHAT)),
        "messages": _posts("messages", "/v1/messages", messages)
        | _posts("messages", "/v1/messages/count_tokens", messages),
        "ollama": _posts("ollama", "/api/chat", mutated(
            {"model": model, "messages": user, "options": {"num_predict": 4}}, _OLLAMA))
        | _posts("ollama", "/api/generate", mutated(
            {"model": model, "prompt": "The sky", "options": {"num_predict": 4}}, _OLLAMA)),
        "responses": _posts("responses", "/v1/responses", mutated(
            {"model": model, "input": "Hi", "max_output_tokens": 4}, _RESPONSES)),
        "others": st.builds(
            lambda path, body: FuzzRequest("others", "POST", path, body),
            _OTHER_PATHS, mutated({"model": model, "input": "Hi"}, _OTHERS, 5)),
        "sessions": _posts("sessions", "/open_session", mutated(
            {"capacity_of_str_len": 1000, "session_id": "s"}, _SESSION))
        | _posts("sessions", "/generate", st.builds(
            lambda body, params, rid: {**body, "session_params": params, "rid": rid},
            _generate(), _SESSION_PARAMS, st.sampled_from(["r", None])))
        | _posts("sessions", "/close_session", mutated({"session_id": "s"}, _SESSION)),
        "translation": _posts("translation", "/v1/translation/sessions", _translation())
        | _posts("translation", "/v1/translation/sessions/{session}/updates", _updates())
        | _posts("translation", "/v1/translation/sessions/{session}/finish", JUNK),
        "websocket": _socket(_updates()),
        "admin": _admin(),
        "raw": _raw(),
    }  # fmt: skip


_LENGTHS = frozenset({"max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens"})


def shortened(request: FuzzRequest, most: int) -> FuzzRequest:
    """The request, with valid but long outputs cut to `most` tokens.

    Where /generate is told no length it writes 128 tokens: it is told `most`.
    """
    body = _shortened(request.body, most)
    if request.path == "/generate" and isinstance(body, dict):
        params = body.get("sampling_params")
        if isinstance(params, dict) and params:
            body = body | {"sampling_params": {"max_new_tokens": most} | params}
    return replace(request, body=body)


def _shortened(value: Any, most: int, levels: int = 4) -> Any:
    """Lengths stand within the first levels; what is nested deeper is left as it is."""
    if levels == 0:
        return value
    if isinstance(value, list):
        return [_shortened(v, most, levels - 1) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        k: most
        if k in _LENGTHS and type(v) is int and most < v < 1 << 31
        else _shortened(v, most, levels - 1)
        for k, v in value.items()
    }


def block(strategy: Any, number: int, size: int) -> list[FuzzRequest]:
    """`size` requests, always the same for a number."""
    made: list[FuzzRequest] = []

    @seed(number)
    @settings(
        max_examples=size, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def collect(request: FuzzRequest) -> None:
        made.append(request)

    run: Callable[[], None] = collect
    run()
    return [made[i % len(made)] for i in range(size)]
