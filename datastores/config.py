"""Options of retrieval, and the error that every function of this package raises."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Suffixes are ordered by this many tokens and no more: longer prefixes cannot be searched.
SORT_DEPTH = 12
MAX_BRANCH_LENGTH = 64
MAX_SAMPLES = 4096
MAX_MATCH_LENGTH = 256


class DatastoreError(Exception):
    """Something given to the datastore is unusable; the message is one line for a person."""


class DeletionPending(DatastoreError):
    """Searches find it no more, but a file still has it; it is tried again until none has."""


class DatastoreClosed(DatastoreError):
    """It takes nothing in any more."""


class DatastoreInUse(DatastoreError):
    """Another process writes to the folder."""


@dataclass(frozen=True)
class RetrievalConfig:
    """How continuations are looked up and turned into probabilities.

    Lengths and limits follow the SSSD paper (arXiv 2411.05894, Algorithms 1-3). Its discount
    constants are not published with it; the ones here were fitted offline, by what the budget
    (sglang_ext/budget/choice.py) makes of the drafts, on answers of SmolLM2-135M-Instruct to
    Spec-Bench's and GSM8K's questions, a quarter held back from a datastore of the others. A replay
    of Python sources (scripts/lib/retrieval_replay.py), where long matches say more, kept
    datastore_power up.

    One estimator does the paper's discounting (Algorithm 1) and weighted merge (Algorithm 3). An
    occurrence whose match is m tokens long weighs (m / 4) ** power, so that longer matches outvote
    shorter ones. With c the weight of a child, n that of all children of its parent, per source,
    the child follows its parent with probability

        (c_input + s * c_datastore) / (n_input + s * n_datastore + novelty)

    s = datastore_weight, less where the datastore's evidence exceeds datastore_cap. novelty is
    the weight of "something not seen": novelty / m ** novelty_power times the weight of one of
    the longest matches, the larger of the two sources'; below the root m is longer by the tokens
    drafted. So what was seen once is believed little after a match of one token, and mostly after
    one of eight, and evidence adds up within a source and across the two.
    """

    prefix_length: int = 8
    """P: so many of the last tokens are searched for, then fewer (1..12). The paper's system
    uses 4; more tell a text seen before from a common phrase."""
    max_match_length: int = 32
    """Occurrences of all P tokens are compared further back, up to so many tokens (P..256): the
    longer the match, the surer the continuation."""
    branch_length: int = 12
    """Continuations are at most this long, in tokens (1..64), and never longer than the draft.
    The paper's system uses 8; a longer one pays on text seen before."""
    max_samples: int = 100
    """Datastore continuations read per query, over all sub-indices; 0 turns the datastore off."""
    max_input_samples: int = 100
    """Input continuations read per query, longest match first, then newest; 0 turns input off."""
    max_input_scan: int = 4096
    """Occurrences of the last two tokens that are compared per query, newest first."""
    max_input_tokens: int = 1 << 20
    """Tokens one InputTrie keeps; beyond that it forgets the older half (about 30 B/token)."""
    min_matches: int = 16
    """Shorter datastore prefixes are searched too until this many occurrences are found."""
    input_power: float = 2.3
    """How much more a longer match weighs in the input: (m / 4) ** input_power."""
    datastore_power: float = 3.2
    """How much more a longer match weighs in the datastore: (m / 4) ** datastore_power."""
    datastore_weight: float = 0.18
    """Weight of one datastore occurrence against an input occurrence."""
    datastore_cap: float = 9.0
    """Datastore evidence counts for at most so many of its longest matches, so that the input
    keeps a say."""
    input_novelty: float = 2.0
    """Unseen continuations after an input match of one token, in occurrences."""
    input_novelty_power: float = 0.95
    """How fast that falls with the length of the match."""
    datastore_novelty: float = 5.6
    """Unseen continuations after a datastore match of one token, in occurrences."""
    datastore_novelty_power: float = 0.9
    """How fast that falls with the length of the match."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("prefix_length", 1, SORT_DEPTH),
            ("max_match_length", self.prefix_length, MAX_MATCH_LENGTH),
            ("branch_length", 1, MAX_BRANCH_LENGTH),
            ("max_samples", 0, MAX_SAMPLES),
            ("max_input_samples", 0, MAX_SAMPLES),
            ("max_input_scan", 1, 1 << 30),
            ("max_input_tokens", 2, 1 << 30),
            ("min_matches", 1, 1 << 30),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise DatastoreError(f"{name} must be a whole number, got {value!r}")
            if not low <= value <= high:
                raise DatastoreError(f"{name} must be between {low} and {high}, got {value}")
        for name, low_open, high_closed in (
            ("input_power", 0.0, 20.0),
            ("datastore_power", 0.0, 20.0),
            ("datastore_weight", 0.0, 1e6),
            ("datastore_cap", 0.0, 1e9),
            ("input_novelty", 0.0, 1e6),
            ("input_novelty_power", 0.0, 20.0),
            ("datastore_novelty", 0.0, 1e6),
            ("datastore_novelty_power", 0.0, 20.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
                raise DatastoreError(f"{name} must be a number, got {value!r}")
            if not low_open < value <= high_closed:
                raise DatastoreError(
                    f"{name} must be above {low_open:g} and at most {high_closed:g}, got {value}"
                )

    @cached_property
    def limits(self) -> np.ndarray:
        """int64[LIMITS]: the whole-number options, in the order of columns.py."""
        return np.array(
            [
                self.prefix_length,
                self.max_match_length,
                self.branch_length,
                self.max_samples,
                self.max_input_samples,
                self.max_input_scan,
                self.min_matches,
            ],
            dtype=np.int64,
        )

    @cached_property
    def weights(self) -> np.ndarray:
        """float64[SOURCE_WEIGHTS], in columns.py's order: datastore_weight, datastore_cap."""
        return np.array([self.datastore_weight, self.datastore_cap], np.float64)

    @cached_property
    def length_weights(self) -> np.ndarray:
        """float64[2, max_match_length + 1]: weight of an occurrence per source."""
        lengths = np.arange(self.max_match_length + 1.0) / 4.0
        return np.stack((lengths**self.input_power, lengths**self.datastore_power))

    @cached_property
    def novelty(self) -> np.ndarray:
        """float64[2, max_match_length + branch_length + 1]: occurrences of something unseen."""
        lengths = np.arange(self.max_match_length + self.branch_length + 1.0)
        lengths = np.maximum(lengths, 1.0)
        return np.stack(
            (
                self.input_novelty * lengths**-self.input_novelty_power,
                self.datastore_novelty * lengths**-self.datastore_novelty_power,
            )
        )
