"""A predicted output (OpenAI's `prediction`): what a client expects to be written, as a draft.

It is followed as SSBD follows a previous output (realignment.py), at a bias of 0: what is written
is the target's alone. Where the output leaves it for longer, as where a paragraph is put in, it is
found again by the last tokens that were written, anywhere in the prediction.
"""

import base64
import binascii
from array import array
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from sglang_ext.drafters.realignment import LONGEST_RUN, PreviousOutput
from sglang_ext.tree import TokenTree

MOST_TOKENS = 1 << 14
"""Of a prediction."""
TOKENS_KEY = "prediction_tokens"
"""The key of `custom_params` under which a scheduler gets the tokens; no client's."""
# After so many tokens that the prediction has not, nothing is drafted until it is found again; at
# first sooner, as a prediction may have nothing to do with what is written.
_ASTRAY = 12
_ASTRAY_AT_FIRST = 3
# A run of fewer tokens is in any text.
_CERTAIN_RUN = 2


class PredictedText:
    """A prediction, followed by what is written. One thread at a time.

    Args:
        tokens: the prediction's token ids.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._previous = PreviousOutput(tokens)
        # A character for each token: so text search finds runs of tokens.
        self._text = "".join(map(chr, tokens))
        self._seen = 0
        self._astray = 0
        """Tokens written since the last one that the prediction has in its place."""
        self._most_astray = _ASTRAY_AT_FIRST
        self._written = bytearray(len(tokens))
        """1 for each token of the prediction that was written."""

    @property
    def agrees(self) -> bool:
        """Whether all that was written is a beginning of the prediction, and more is left of it."""
        return bool(self._previous.expected())

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that stand in the output, in their place; never more than it."""
        return min(sum(self._written), self._seen)

    def follow(self, output: Sequence[int]) -> None:
        """Take in the output, which begins with what was followed before."""
        for end in range(self._seen + 1, len(output) + 1):
            self._take(output[max(0, end - LONGEST_RUN) : end])
        self._seen = max(self._seen, len(output))

    def drafts(self, max_nodes: int) -> TokenTree:
        """What may follow, best first; nothing where the output has left the prediction."""
        return TokenTree.empty() if self._is_lost else self._previous.drafts(max_nodes)

    @property
    def _is_lost(self) -> bool:
        at_end = self._astray > 0 and self._previous.place >= len(self._text)
        return at_end or self._astray > self._most_astray

    def _take(self, last: Sequence[int]) -> None:
        previous = self._previous
        if self._is_lost:
            self._find(last)
        else:
            previous.step(last)
        run = 1 if previous.agreed else previous.run
        if self._is_lost or not (previous.agreed or run >= _CERTAIN_RUN):
            self._astray += 1
            return
        self._astray, self._most_astray = 0, _ASTRAY
        place = previous.place
        self._written[place - run : place] = b"\1" * run

    def _find(self, last: Sequence[int]) -> None:
        """Go on behind the last tokens, where the prediction has them: further on, else at all."""
        if len(last) < LONGEST_RUN:
            return
        run = "".join(map(chr, last))
        at = self._text.find(run, max(0, self._previous.place - self._most_astray))
        at = at if at >= 0 else self._text.find(run)
        if at >= 0:
            self._previous.meet(at + LONGEST_RUN)
            self._astray = 0


def packed_tokens(tokens: Sequence[int]) -> str:
    """Token ids as text of ASCII, as `custom_params` can carry them to a scheduler."""
    return base64.b64encode(array("i", tokens)).decode()


def tokens_of(params: Mapping[str, Any], vocab_size: int) -> list[int]:
    """The predicted tokens that a request's `custom_params` carry; none without a prediction.

    What is no token of the model cannot be written: nothing behind it is of use.

    Raises:
        ValueError: they are not as `packed_tokens` gives them.
    """
    packed = params.get(TOKENS_KEY)
    if packed is None:
        return []
    try:
        tokens = array("i", base64.b64decode(packed, validate=True))
    except (TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f"custom_params.{TOKENS_KEY} is no list of tokens: {error}") from None
    return list(takewhile(lambda token: 0 <= token < vocab_size, tokens[:MOST_TOKENS]))
