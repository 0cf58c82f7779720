"""How items are made from data: through the chat template, in an order that the seed decides."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sglang_ext.sweep.data_files import Messages
from sglang_ext.sweep.items import Item, Workload

# Prompts that were served before, by measured ones: a server in use has served many more.
SERVED_TIMES = 8
# Tokens of the context that are left free, for drafts and what the server adds.
_RESERVED = 64

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Source:
    """What a workload is made from: its kind, and load_workload's arguments."""

    name: str
    kind: str
    tokenizer: Any
    data: Path
    prompts: int
    max_tokens: int
    seed: int
    context_len: int

    @property
    def room(self) -> int:
        """Tokens that a prompt may have."""
        return self.context_len - self.max_tokens - _RESERVED

    def shuffled(self, things: Iterable[Thing]) -> list[Thing]:
        """In an order that the seed decides."""
        order = list(things)
        random.Random(f"{self.name} {self.seed}").shuffle(order)
        return order

    def item(self, name: str, category: str, messages: Messages, **template: Any) -> Item | None:
        """A request, unless its prompt is too long.

        Args:
            template: what else the chat template is told.
        """
        ids = self._ids(messages, **template)
        return Item(name, category, ids, self.max_tokens) if len(ids) <= self.room else None

    def count(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def split(self, items: Iterator[Item], available: int) -> Workload:
        """The first ones are measured, at most half of what is there, the next were served.

        Args:
            available: how many `items` has, or more.
        """
        measured = min(self.prompts, -(-available // 2))
        taken = list(islice(different(items), measured + SERVED_TIMES * self.prompts))
        measured = min(measured, -(-len(taken) // 2))
        return self.workload(taken[:measured], taken[measured:])

    def halves(
        self,
        things: Sequence[Thing],
        items: Callable[[Sequence[Thing]], Iterator[Item]],
        served_times: int = SERVED_TIMES,
    ) -> Workload:
        """Every other thing makes measured items, the rest those that were served before."""
        measured = list(islice(different(items(things[::2])), self.prompts))
        served = different(items(things[1::2]), but=measured)
        return self.workload(measured, list(islice(served, served_times * self.prompts)))

    def workload(self, measured: Sequence[Item], served_before: Sequence[Item]) -> Workload:
        """A workload of this name."""
        return Workload(self.name, self.kind, tuple(measured), tuple(served_before))

    def _ids(self, messages: Messages, **template: Any) -> tuple[int, ...]:
        if not getattr(self.tokenizer, "chat_template", None):  # a base model
            return tuple(self.tokenizer.encode("\n\n".join(text for _, text in messages)))
        turns = [{"role": role, "content": text} for role, text in messages]
        ids = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False, **template
        )
        return tuple(map(int, ids))


def different(items: Iterable[Item], but: Iterable[Item] = ()) -> Iterator[Item]:
    """Each prompt once, and none of `but`."""
    seen = {item.input_ids for item in but}
    for item in items:
        if item.input_ids not in seen:
            seen.add(item.input_ids)
            yield item
