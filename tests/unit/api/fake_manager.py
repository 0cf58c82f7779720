"""A TokenizerManager that translates by upper-casing, with a tokenizer of bytes, and no model."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

EOS, USER, ASSISTANT = 256, 257, 258
SPECIALS = {EOS: "<eos>", USER: "<user>", ASSISTANT: "<assistant>"}


class ByteTokenizer:
    """A token is a byte, so that "é" has two; three special tokens beside."""

    chat_template = "<user>{content}<assistant>"
    eos_token_id = EOS

    def __init__(self):
        self.template_options: dict[str, Any] = {}

    def encode(self, text, add_special_tokens=True):
        tokens: list[int] = []
        while text:
            for token, name in SPECIALS.items():
                if text.startswith(name):
                    tokens.append(token)
                    text = text[len(name) :]
                    break
            else:
                tokens += text[0].encode()
                text = text[1:]
        return tokens

    def decode(self, tokens, skip_special_tokens=False):
        parts, text = bytearray(), ""
        for token in tokens:
            if token < 256:
                parts.append(token)
            elif not skip_special_tokens:
                text += parts.decode(errors="replace") + SPECIALS[token]
                parts.clear()
        return text + parts.decode(errors="replace")

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **options):
        assert not tokenize and add_generation_prompt
        self.template_options = options
        return f"<user>{messages[0]['content']}<assistant>"


@dataclass
class Request:
    """GenerateReqInput, as far as it is used."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool = False
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def params(self):
        return self.sampling_params["custom_params"]


@dataclass
class FakeManager:
    """Answers with the text after the last line feed of the user message, in upper case.

    Attributes:
        piece, pause: tokens that come at once, and seconds before them.
        gate: generations wait here between tokens, if it is not set.
        fault: raised, or a finish_reason that ends the output.
        requests, aborted: all that came, and those that were given up.
    """

    context_len: int = 4096
    incremental_streaming_output: bool = False
    piece: int = 3
    pause: float = 0.0
    answer: str | None = None
    fault: Exception | dict[str, Any] | None = None
    tokenizer: Any = field(default_factory=ByteTokenizer)
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    gracefully_exit: bool = False
    num_reserved_tokens: int = 0
    served_model_name: str = "fake"
    model_path: str = "/models/fake"

    def __post_init__(self):
        self.gate = asyncio.Event()
        self.gate.set()
        self.model_config = SimpleNamespace(
            hf_eos_token_id={EOS},
            get_default_sampling_params=lambda: {"temperature": 0.7, "top_p": 0.8},
        )

    @property
    def sources(self):
        """The source of each request, as the model read it."""
        return [self.source(r) for r in self.requests]

    async def gate_set(self, is_open):
        """Open or close the gate, from another thread."""
        (self.gate.set if is_open else self.gate.clear)()

    def source(self, request):
        ids = request.input_ids
        message = ids[1 : len(ids) - len(self.held(request))]
        return self.tokenizer.decode(message, skip_special_tokens=True).rpartition("\n")[2]

    def held(self, request):
        """The tokens behind the prompt, with which the answer begins."""
        ids = request.input_ids
        return ids[ids.index(ASSISTANT) + 1 :] if ASSISTANT in ids else []

    async def generate_request(self, request):
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for output in self._outputs(request):
                yield output
        except BaseException:
            self.aborted.append(request.rid)
            raise
        finally:
            self.running -= 1

    async def _outputs(self, request):
        text = self.source(request).upper() if self.answer is None else self.answer
        whole = [*self.tokenizer.encode(text)[len(self.held(request)) :], EOS]
        limit = request.sampling_params["max_new_tokens"]
        tokens = whole[:limit]
        sent = 0
        for end in range(self.piece, len(tokens) + self.piece, self.piece):
            await asyncio.sleep(self.pause)
            await self.gate.wait()
            if isinstance(self.fault, Exception):
                raise self.fault
            part, end = tokens[sent:end], min(end, len(tokens))
            reason = None
            if end == len(tokens):
                cut = len(tokens) < len(whole)
                reason = {"type": "length"} if cut else {"type": "stop", "matched": EOS}
            if self.fault is not None:
                reason = self.fault
            if request.stream or reason is not None:
                increment = request.stream and self.incremental_streaming_output
                ids = part if increment else tokens[:end]
                yield {
                    "output_ids": ids,
                    "text": self.tokenizer.decode(ids, skip_special_tokens=True),
                    "meta_info": {
                        "finish_reason": reason,
                        "prompt_tokens": len(request.input_ids),
                        "completion_tokens": end,
                        "spec_num_correct_drafts": len(request.params["ssbd"].get("draft", ())),
                    },
                }
            if self.fault is not None:
                return
            sent = end
