"""What benchmarks of translation share: prompts, a cache that starts alike, corpora, progress."""

import time
from collections.abc import Sequence
from typing import Protocol

from scripts.lib.client import TIMEOUT_S, flush_cache, generate
from scripts.lib.http_client import HTTP
from scripts.lib.spec_bench import tokenizer
from scripts.lib.ssbd_metrics import common_prefix


class PromptSettings(Protocol):
    """What prompts are made from.

    Attributes:
        template: the message to the model, with {source}, {source_language}, {target_language}.
    """

    @property
    def model(self) -> str: ...
    @property
    def template(self) -> str: ...
    @property
    def source_language(self) -> str: ...
    @property
    def target_language(self) -> str: ...


def server_template() -> str:
    """The message of the server's own translation sessions; its source comes last."""
    from sglang_ext.api.translation.translator import DEFAULT_TEMPLATE

    return DEFAULT_TEMPLATE


class Prompts:
    """A model's prompts for one pair of languages, as token ids.

    Args:
        settings: the model, the languages and the template of the message.
    """

    def __init__(self, settings: PromptSettings):
        self._tokenizer = tokenizer(settings.model)
        self._settings = settings
        self._special = frozenset(self._tokenizer.all_special_ids)
        first, second = self.ids("a"), self.ids("Z")
        self.before_source = first[: common_prefix(first, second)]

    def ids(self, source: str) -> list[int]:
        """The whole prompt, through the model's chat template."""
        text = self._settings.template.format(
            source=source,
            source_language=self._settings.source_language,
            target_language=self._settings.target_language,
        )
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=False,
            enable_thinking=False,  # as translation sessions ask
        )

    def without_end(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """An output without the end token."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._special:
            end -= 1
        return tuple(token_ids[:end])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; special ones are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def fresh_cache(url: str, prompts: Prompts) -> None:
    """Have a server's radix cache hold the instruction, and nothing else."""
    flush_cache(url)
    params = {"drafter": "none", "ingest": False}
    generate(url, prompts.before_source, params=params, max_new_tokens=1)


def add_corpus(url: str, name: str, documents: Sequence[str]) -> None:
    """Give a server's drafters a corpus to draft from (SGLang's /add_external_corpus)."""
    body = {"corpus_id": name, "documents": list(documents)}
    response = HTTP.post(url + "/add_external_corpus", json=body, timeout=TIMEOUT_S)
    response.raise_for_status()


def remove_corpus(url: str, name: str) -> None:
    """Take a corpus from a server's drafters (SGLang's /remove_external_corpus)."""
    body = {"corpus_id": name}
    response = HTTP.post(url + "/remove_external_corpus", json=body, timeout=TIMEOUT_S)
    response.raise_for_status()


class Progress:
    """Lines that say how far a phase is, and how long it will still take.

    Args:
        work: requests of the whole phase.
    """

    def __init__(self, phase: str, work: int):
        self._phase, self._work, self._done = phase, work, 0
        self._start = time.monotonic()

    def show(self, done: int, text: str) -> None:
        """`done` more requests were answered."""
        self._done += done
        left = (time.monotonic() - self._start) / self._done * (self._work - self._done)
        print(f"{self._phase}: {text}; {left / 60:.0f} min left of this phase", flush=True)
