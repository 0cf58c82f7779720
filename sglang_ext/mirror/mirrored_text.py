"""One request, as its drafter follows it: what the executor was told, and what it has drafted."""

from collections.abc import Iterator, Sequence
from itertools import count

from sglang_ext.mirror import messages, text_keys
from sglang_ext.mirror.executor_client import Connection
from sglang_ext.mirror.foresight import Foreseen
from sglang_ext.mirror.mirror_options import MirrorOptions
from sglang_ext.mirror.shared_ring import Record

# Drafted tokens that are kept of a request: far more than a pass can use.
_MOST_DRAFTED = 4096
# An executor that forgets a request so often has no room for it.
_MOST_FORGOTTEN = 8
_numbers = count(1)


class MirroredText:
    """A request's text at both ends of the channel.

    Attributes:
        number: what the executor knows the request by.
        length: tokens of the text.
        ask: the number of the ask that is not answered yet; 0: none.
        asked_at: when it was made, in seconds.
        heard: something was drafted for it since it was last waited for in vain. An executor that
            is still reading a long prompt is not waited for in each step.
        view: what the early exit has told of the pass; None: it has not, or its outcome is known.
        viewed: it has told of the last pass.
        proposed: the draft of the last step.
        whole: its drafts are verified whole, whatever they cost (`budget: fixed`), and waited for.

    Args:
        prompt: the text's beginning.
        options: what its request asks for.
    """

    def __init__(
        self, prompt: Sequence[int], options: MirrorOptions | None = None, whole: bool = False
    ) -> None:
        self.options = options or MirrorOptions()
        self.whole = whole
        self.number = next(_numbers) & 0xFFFFFFFF
        self.length = len(prompt)
        self.ask = 0
        self.asked_at = 0.0
        self.heard = True
        self.view: Foreseen | None = None
        self.viewed = False
        self.proposed: list[int] = []
        self._prompt = prompt
        self._key = text_keys.of_text(prompt)
        self._drafted: dict[int, tuple[int, int, float]] = {}
        self._told = 0
        self._connection: Connection | None = None
        self._forgotten = 0

    @property
    def follows(self) -> bool:
        """Whether the executor was told all of it."""
        return self._told == self.length

    def waits_for(self, connection: Connection) -> bool:
        """Whether this executor has not answered its ask."""
        return bool(self.ask) and self._connection is connection

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens` were committed."""
        self.length += len(tokens)
        self._key = text_keys.of_text(tokens, self._key)
        if len(self._drafted) > _MOST_DRAFTED:
            self._drafted.clear()
        kept = {key: one for key, one in self._drafted.items() if one[0] >= self.length}
        self._drafted = kept

    def tell(self, connection: Connection, output: Sequence[int]) -> None:
        """Tell the executor what it was not told, as far as there is room.

        Raises:
            ChannelError: the channel is of no more use.
        """
        if self._connection is not connection:
            self._connection, self._told, self.ask, self.heard = connection, 0, 0, True
            self._drafted.clear()
        if self._told == self.length or self._forgotten >= _MOST_FORGOTTEN:
            return
        records = list(self._untold(output))
        sent = connection.channel.send(*records)
        self._told += sum(record.items for record in records[:sent])

    def _untold(self, output: Sequence[int]) -> Iterator[Record]:
        behind = self._told - len(self._prompt)
        written = output[: self.length - len(self._prompt)]
        tokens = [*self._prompt[self._told :], *written] if behind < 0 else written[behind:]
        flags = 0 if self.options.retrieval else messages.NO_RETRIEVAL
        flags |= 0 if self.options.streams else messages.NO_STREAMS
        return messages.text_records(self.number, tokens, self._told, flags)

    def lost(self, forever: bool) -> None:
        """The executor does not follow it (any more)."""
        self._told = 0
        self._forgotten += _MOST_FORGOTTEN if forever else 1

    def take(self, key: int, length: int, token: int, prob: float) -> None:
        """A drafted token: `token` follows the text of this key."""
        self.heard = True
        if length >= self.length:
            self._drafted[key] = (length, token, prob)

    def chain(self, most: int) -> tuple[list[int], list[float]]:
        """What was drafted behind the text: tokens, and the probability of reaching each."""
        key, tokens, probs, reached = self._key, list[int](), list[float](), 1.0
        while len(tokens) < most and (drafted := self._drafted.get(key)) is not None:
            _, token, prob = drafted
            reached *= prob
            tokens.append(token)
            probs.append(reached)
            key = text_keys.extended(key, token)
        return tokens, probs

    def agreed(self, tokens: Sequence[int]) -> tuple[int, int]:
        """How many of the last draft's tokens the committed ones told right, and how many wrong."""
        proposed, self.proposed = self.proposed, []
        right = 0
        for mine, theirs in zip(proposed, tokens, strict=False):
            if mine != theirs:
                return right, 1
            right += 1
        return right, 0
