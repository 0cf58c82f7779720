"""What a request has drafted so far: a chain of tokens, and what the model predicts after each."""

from collections.abc import Generator, Sequence

from speech.specasr.cache import DraftCache
from speech.specasr.draft_model import Feed, Prediction

# A forward pass asked for, and its answer.
Feeding = Generator[Feed, list[Prediction], None]


class Chain:
    """The cache's chain of tokens, with a prediction after each of them.

    Attributes:
        cache: K and V of the tokens.
        predictions: what comes after each token of the chain.
        drafted: the tokens of the last draft, committed ones included: the chain and, as a rule, a
            last token that was not fed.
        start: where in `drafted` the last trunk begins.
        choices: by place in `drafted`, the target's own token there, given the draft before it.
        certain: choices before this place are what the target will say: all before them is right.
        decoded, recycled: tokens of drafts, since whoever counts them set them to 0.
    """

    def __init__(self, cache: DraftCache) -> None:
        self.cache = cache
        self.predictions: list[Prediction] = []
        self.drafted: list[int] = []
        self.start = 0
        self.choices: dict[int, int] = {}
        self.certain = 0
        self.decoded = 0
        self.recycled = 0

    def __len__(self) -> int:
        return len(self.predictions)

    @property
    def tokens(self) -> list[int]:
        """The tokens that have K and V."""
        return self.cache.tokens

    def truncate(self, length: int) -> None:
        """Forget all from `length` on, branches included."""
        self.cache.truncate(length)
        del self.predictions[length:]

    def forget_draft(self, committed: Sequence[int]) -> None:
        """Keep nothing of the last draft but what was committed."""
        same = self.common(committed)
        del self.drafted[same:]
        self.truncate(min(len(self), same))

    def reset(self) -> None:
        """Forget everything but the audio: what is needed is fed again."""
        self.truncate(0)
        self.drafted = []
        self.choices, self.certain = {}, 0

    def feed(self, tokens: Sequence[int]) -> Feeding:
        """Run `tokens` after the chain's end."""
        self.predictions += yield Feed.chain(tokens, len(self) - 1)

    def common(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens of the last draft are those of `tokens`."""
        length = min(len(self.drafted), len(tokens))
        for i in range(length):
            if self.drafted[i] != tokens[i]:
                return i
        return length
