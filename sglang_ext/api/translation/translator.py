"""Sources through SGLang's tokenizer manager, in this process, and outputs as text."""

import contextlib
import re
import unicodedata
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

from sglang_ext.api.http import ApiError, checked_meta
from sglang_ext.api.translation.session_settings import SessionSettings

# The source comes last, so that the radix cache keeps all that was read before it grew.
DEFAULT_TEMPLATE = (
    "Translate the following text from {source_language} to {target_language}. "
    "Answer with the translation only.\n\n{source}"
)
_PLACEHOLDER = re.compile(r"\{(source|source_language|target_language)\}")
# A translation is rarely twice as long as its source, but a short one may be.
_TOKENS_PER_SOURCE_TOKEN, _MORE_TOKENS = 2, 64

# Scripts without spaces between words, by the Unicode names of their letters.
_UNSPACED = re.compile("CJK|HIRAGANA|KATAKANA|THAI|LAO|KHMER|MYANMAR")
_JOINER = "\u200d"  # zero width joiner

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Translation:
    """What the model wrote for a source.

    Attributes:
        token_ids: without the tokens that end an output: the next draft.
        text: the same, without white space around it.
        finish_reason: "stop", or "length" where max_tokens or the context cut it.
        prompt_tokens, completion_tokens: as SGLang counts them.
        accepted_draft_tokens: how many of the output were drafted.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_draft_tokens: int = 0


class Translator:
    """The served model as a translator.

    Args:
        manager: SGLang's TokenizerManager.
        template_options: SGLang's --default-chat-template-kwargs.
    """

    def __init__(self, manager: Any, template_options: Mapping[str, Any] | None = None):
        self._manager = manager
        self._tokenizer = manager.tokenizer
        # A model that thinks first would not be live.
        self._template_options = {**(template_options or {}), "enable_thinking": False}
        eos = {getattr(self._tokenizer, "eos_token_id", None)}
        self._eos = frozenset(eos | set(manager.model_config.hf_eos_token_id or ())) - {None}

    @property
    def model_names(self) -> list[str]:
        """The names that requests may call the model by."""
        return [self._manager.served_model_name, self._manager.model_path]

    async def translate(
        self,
        settings: SessionSettings,
        source: str,
        draft: Sequence[int],
        namespace: str,
        ingest: str | None,
        on_text: OnText | None = None,
        held: int = 0,
    ) -> Translation:
        """Translate `source`; if this task is cancelled, SGLang aborts the request.

        Args:
            draft: token ids of the last translation.
            namespace: whose served outputs the request reads and joins.
            ingest: the name by which the output joins the datastore; None: it does not.
            on_text: gets the text so far, again and again.
            held: so many tokens of `draft` the translation begins with, whatever the model would
                have written (prefix-constrained decoding).

        Raises:
            ApiError: the prompt does not fit, or SGLang refused or aborted the request.
        """
        first, rest = tuple(draft[:held]), draft[held:]
        stream = on_text is not None
        request = self._request(settings, source, first, rest, namespace, ingest, stream)
        increments = on_text is not None and self._manager.incremental_streaming_output
        tokens: list[int] = []
        text = ""
        meta: Mapping[str, Any] = {}
        try:
            async with contextlib.aclosing(self._manager.generate_request(request)) as outputs:
                async for output in outputs:
                    meta = checked_meta(output)
                    if increments:
                        tokens += output["output_ids"]
                        text += output["text"]
                    else:
                        tokens, text = output["output_ids"], output["text"]
                    if on_text is not None:
                        on_text((self._decoded([*first, *tokens]) if first else text).strip())
        except ValueError as error:  # SGLang's, and those of custom_params
            raise ApiError(str(error)) from error
        except HTTPException as error:
            raise ApiError(str(error.detail), error.status_code) from error
        return self._translation(first + self._without_end(tokens, meta), len(tokens), meta)

    def _translation(
        self, kept: tuple[int, ...], written: int, meta: Mapping[str, Any]
    ) -> Translation:
        return Translation(
            token_ids=kept,
            text=self._decoded(kept).strip(),
            finish_reason="length" if _reason(meta).get("type") == "length" else "stop",
            prompt_tokens=meta.get("prompt_tokens", 0),
            completion_tokens=meta.get("completion_tokens", written),
            accepted_draft_tokens=meta.get("spec_num_correct_drafts", 0),
        )

    def stable_part(self, translation: Translation, mask: int) -> str:
        """The beginning of the text that the last `mask` tokens have no share in.

        It ends where a word ends (in scripts without spaces, a character as a reader sees it): a
        word that is partly among those tokens would change on the screen.
        """
        if not mask:
            return translation.text
        shown = self._decoded(translation.token_ids[: -mask or None]).lstrip()
        # Half a character decodes to something else than the whole text has there.
        end = _common(shown, translation.text)
        while _within_character(translation.text, end) or _within_word(translation.text, end):
            end -= 1
        return translation.text[:end]

    def settled(
        self, before: Translation, now: Translation, held: int, mask: int
    ) -> tuple[int, str]:
        """What two successive translations begin with alike (LocalAgreement-2, Liu et al. 2020).

        A last word counts in neither: it may be half of one, or end where the source breaks off.

        Args:
            held: so many tokens are settled already; there are no fewer of them.
            mask: so many tokens at the end are not settled.

        Returns:
            How many tokens of `now` are settled, and their text, which ends where a word ends.
        """
        alike = _common(before.token_ids, now.token_ids)
        furthest = min(_last_word(before.text), _last_word(now.text))
        for count in range(min(alike, len(now.token_ids) - mask), held, -1):
            text = self._decoded(now.token_ids[:count]).lstrip()
            # A model writes words with the space before them: it could not go on behind a space.
            if len(text) <= furthest and text == text.rstrip() and _is_whole(now.text, text):
                return count, text
        # What was held began this translation: its text is not less than it was.
        return held, self._decoded(now.token_ids[:held]).strip()

    def _request(
        self,
        settings: SessionSettings,
        source: str,
        held: Sequence[int],
        draft: Sequence[int],
        namespace: str,
        ingest: str | None,
        stream: bool,
    ) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        source = source.strip()
        prompt = [*self._prompt(settings, source), *held]
        ssbd = {
            "draft": list(draft) or None,
            "beta": settings.beta,
            "trim": settings.trim_draft,
            "realign": settings.realign,
            "retrieve": settings.retrieve,
        }
        # As /v1/chat/completions: the model's own settings hold where the session has none.
        sampling = self._manager.model_config.get_default_sampling_params() | {
            "temperature": settings.temperature,
            "max_new_tokens": self._max_tokens(settings, source, len(prompt), len(held)),
            "custom_params": {
                "drafter": "ssbd",
                "namespace": namespace,
                "ingest": ingest is not None,
                **({"ingest_name": ingest} if ingest is not None else {}),
                "ssbd": {name: value for name, value in ssbd.items() if value is not None},
            },
        }
        if settings.seed is not None:
            sampling["sampling_seed"] = settings.seed
        rid = f"trs-{uuid.uuid4().hex}"
        return GenerateReqInput(
            rid=rid,
            input_ids=prompt,
            sampling_params=sampling,
            stream=stream,
            cache_salt=settings.cache_salt,
            extra_key=settings.extra_key,
        )

    def _prompt(self, settings: SessionSettings, source: str) -> list[int]:
        """Token ids of the user message in the model's chat template; bare where it has none."""
        values = {
            "source": source,
            "source_language": settings.source_language,
            "target_language": settings.target_language,
        }
        # In one pass: a source may hold "{target_language}".
        message = _PLACEHOLDER.sub(
            lambda found: values[found[1]], settings.template or DEFAULT_TEMPLATE
        )
        if not getattr(self._tokenizer, "chat_template", None):
            return list(self._tokenizer.encode(message))
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            tokenize=False,
            add_generation_prompt=True,
            **self._template_options,
        )
        # The template has written the special tokens.
        return list(self._tokenizer.encode(rendered, add_special_tokens=False))

    def _max_tokens(
        self, settings: SessionSettings, source: str, prompt_tokens: int, held: int
    ) -> int:
        """The most tokens to write.

        Args:
            prompt_tokens: with the `held` ones of the translation at its end.

        Raises:
            ApiError: the context has no room for any.
        """
        context = self._manager.context_len - self._manager.num_reserved_tokens
        room = context - prompt_tokens
        if room < 1:
            raise ApiError(
                f"the prompt with this source has {prompt_tokens} tokens and leaves no room for a "
                f"translation in the model's context of {context}",
                param="source",
                code="context_length_exceeded",
            )
        if settings.max_tokens is not None:
            return min(room, max(1, settings.max_tokens - held))
        tokens = len(self._tokenizer.encode(source, add_special_tokens=False))
        return min(room, _TOKENS_PER_SOURCE_TOKEN * tokens + _MORE_TOKENS)

    def _without_end(self, tokens: Sequence[int], meta: Mapping[str, Any]) -> tuple[int, ...]:
        ends = self._eos | {_reason(meta).get("matched")}
        end = len(tokens)
        while end and tokens[end - 1] in ends:
            end -= 1
        return tuple(tokens[:end])

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many characters, or tokens, both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _last_word(text: str) -> int:
    """Where the last word begins, in characters."""
    end = next((i for i in range(len(text) - 1, -1, -1) if text[i].isalnum()), 0)
    while _within_character(text, end) or _within_word(text, end):
        end -= 1
    return end


def _is_whole(text: str, start: str) -> bool:
    """Whether `start` is a beginning of `text` that ends where a word and a character end."""
    end = len(start)
    return text.startswith(start) and not (_within_character(text, end) or _within_word(text, end))


def _within_character(text: str, end: int) -> bool:
    """Whether what stands at `end` is shown as one with what is before it: accents, emoji."""
    if not 0 < end < len(text):
        return False
    return unicodedata.category(text[end]).startswith("M") or _JOINER in text[end - 1 : end + 1]


def _within_word(text: str, end: int) -> bool:
    """Whether `end` cuts a word of a script that has spaces between words."""
    if not 0 < end < len(text):
        return False
    return all(
        character.isalnum() and not _UNSPACED.match(unicodedata.name(character, ""))
        for character in text[end - 1 : end + 1]
    )


def _reason(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    return meta.get("finish_reason") or {}
