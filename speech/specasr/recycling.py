"""Draft recycling (SpecASR, section IV-B): what was drafted behind a rejected token is used again.

The rest of the old draft stands beside the regenerated tokens; where a regenerated token equals
the old one at the same or an adjacent position, the two meet, and the old draft goes on from there.

The paper re-uses the K and V of that rest as they are. Here it is fed again after the correction:
all of it in the one forward pass that the meeting token needs anyway (a pass of 16 tokens takes
little more than two of one token), which gives K, V and probabilities that know of the correction,
and shows where the model, knowing it, would no longer say the same. The draft is then what the
model would have decoded alone, in a fraction of the passes.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

# While tokens do not meet, each may shift the two by one more.
_WIDEST = 3


def offsets(unmet: int) -> list[int]:
    """Where to look for a token's like: the same position, the adjacent ones, and so on.

    Args:
        unmet: tokens just before it that met nothing.
    """
    widest = min(1 + unmet, _WIDEST)
    return [0, *(sign * n for n in range(1, widest + 1) for sign in (-1, 1))]


class OldDraft:
    """The rest of a rejected draft, and how the tokens in its place line up with it.

    Args:
        tokens: the old draft from its rejected token on.
        key: tokens of one key are taken for the same (" Middle" for " middle"): a wrong guess
            costs nothing, since what comes behind is checked.
        choices: by place among `tokens`, what the target said in that place.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        key: Callable[[int], Hashable],
        choices: Mapping[int, int] | None = None,
    ) -> None:
        self._choices = choices or {}
        self._tokens = list(tokens)
        self._keys = [key(token) for token in self._tokens]
        self._key = key
        self._position = 0
        self._shift = 0
        self._unmet = 0
        self._misses = 0

    @classmethod
    def line_up(
        cls,
        drafted: Sequence[int],
        committed: Sequence[int],
        key: Callable[[int], Hashable],
        choices: Mapping[int, int] | None = None,
    ) -> "OldDraft":
        """What is left of `drafted` behind the committed tokens.

        Args:
            drafted: the tokens of the last draft, with what was committed before it.
            committed: all tokens committed by now.
            choices: by place in `drafted`, what the target said in that place.
        """
        same = 0
        while same < min(len(drafted), len(committed)) and drafted[same] == committed[same]:
            same += 1
        choices = {place - same: token for place, token in (choices or {}).items()}
        old = cls(drafted[same:], key, choices)
        for token in committed[same:]:
            old.meet(token)
        return old

    def rest(self) -> list[int]:
        """The old tokens from the current position on, as they are lined up."""
        return self._tokens[max(0, self._position + self._shift) :]

    @property
    def met(self) -> bool:
        """Whether the last token met the old draft."""
        return self._unmet == 0

    @property
    def same(self) -> bool:
        """Whether all tokens so far met the old draft in their places."""
        return self._shift == 0 and self._misses == 0

    def choice(self) -> int | None:
        """What the target said in the next token's place; None: it was not asked."""
        return self._choices.get(self._position + self._shift)

    def would_meet(self, token: int) -> bool:
        """Whether `token` would meet the old draft."""
        return self._offset(token) is not None

    def meet(self, token: int) -> bool:
        """Take the next token in the old draft's place; True where the two meet there."""
        offset = self._offset(token)
        self._position += 1
        if offset is None:
            self._unmet += 1
            self._misses += 1
            return False
        self._shift += offset
        self._unmet = 0
        return True

    def _offset(self, token: int) -> int | None:
        """How far from its place the old draft has the next token; None: it does not."""
        expected = self._position + self._shift
        key = self._key(token)
        for offset in offsets(self._unmet):
            index = expected + offset
            if 0 <= index < len(self._keys) and self._keys[index] == key:
                return offset
        return None
