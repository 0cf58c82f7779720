"""Which prefills draft behind their prompts: where that saves more than it takes."""

# The first prefills of so many requests draft whatever it saves, and then one of so many that do
# not: what drafts save, and what they take, changes.
_FIRST, _AGAIN = 2, 32
# Drafting is left out where it saves less than this part of what it takes: a request that goes
# without has no drafts later either.
_WORTH = 0.9
_WEIGHT = 0.25  # of a prefill in the means


class PrefillRation:
    """Weighs what drafting in prefills takes against the steps that its tokens save.

    A speech drafter reads the audio and drafts a whole output while the target reads the prompt.
    Alone a request gains by it; eight that are read together would take eight times as long, and a
    plain step of eight hardly longer than one of one. So both are kept apart by how many requests
    a prefill reads, to a power of two.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        """A request's tokens that were right, in the mean."""
        self._noted = 0
        self._seconds: dict[int, float] = {}  # of a request
        self._drafted: dict[int, int] = {}
        self._left_out: dict[int, int] = {}

    def allows(self, requests: int, step_s: float) -> bool:
        """Whether a prefill drafts.

        Args:
            requests: how many it reads.
            step_s: by how many seconds they make each plain step longer.
        """
        kind = requests.bit_length()
        if self._drafted.get(kind, 0) < _FIRST:
            return True
        if self._tokens * step_s >= _WORTH * self._seconds[kind] * requests:
            return True
        left_out = self._left_out[kind] = self._left_out.get(kind, 0) + 1
        return left_out % _AGAIN == 0

    def note(self, requests: int, seconds: float, tokens: int) -> None:
        """A prefill drafted.

        Args:
            requests: how many it read.
            seconds: that drafting took of it.
            tokens: of all drafts, that were right.
        """
        kind, each = requests.bit_length(), seconds / requests
        drafted = self._drafted[kind] = self._drafted.get(kind, 0) + 1
        if drafted <= _FIRST:
            # The first one may have waited for what is made once.
            self._seconds[kind] = min(each, self._seconds.get(kind, each))
        else:
            self._seconds[kind] += _WEIGHT * (each - self._seconds[kind])
        self._noted += 1
        weight = max(_WEIGHT, 1 / self._noted)
        self._tokens += weight * (tokens / requests - self._tokens)
