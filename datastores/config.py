"""Options of retrieval, and the error that every function of this package raises."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Suffixes are ordered by this many tokens and no more: longer prefixes cannot be searched.
SORT_DEPTH = 12
MAX_BRANCH_LENGTH = 64
MAX_SAMPLES = 4096


class DatastoreError(Exception):
    """Something given to the datastore is unusable; the message is one line for a person."""


@dataclass(frozen=True)
class RetrievalConfig:
    """How continuations are looked up and turned into probabilities.

    Lengths and limits follow the SSSD paper (arXiv 2411.05894, Algorithms 1-3). Its discount
    constants are not published with it; the ones here were fitted by offline replay
    (datastores/replay.py) on held-back GSM8K answers and Python sources.

    One estimator does the paper's discounting (Algorithm 1) and weighted merge (Algorithm 3).
    An occurrence whose match is m tokens long counts decay ** (prefix_length - m). With c and n
    these counts for a child and for all children of its parent, per source, the child follows
    its parent with probability

        (c_input + s * c_datastore) / (n_input + s * n_datastore + novelty)

    where s = datastore_weight * min(1, datastore_cap / n_datastore), and novelty, the weight of
    "something not seen yet", is root_novelty at the root and branch_novelty below it. A single
    observation is thus never certain, and evidence adds up across the sources.
    """

    prefix_length: int = 4
    """P: at most so many of the last tokens are matched (1..16)."""
    branch_length: int = 8
    """Continuations are at most this long, in tokens (1..64)."""
    max_samples: int = 100
    """Datastore continuations read per query, over all sub-indices; 0 turns the datastore off."""
    max_input_samples: int = 100
    """Input continuations read per query, longest match first, then newest; 0 turns input off."""
    max_input_scan: int = 4096
    """Occurrences of the last two tokens that are compared per query, newest first."""
    max_input_tokens: int = 1 << 20
    """Tokens one InputTrie keeps; beyond that it forgets the older half (about 30 B/token)."""
    min_matches: int = 32
    """Shorter datastore prefixes are searched too until this many occurrences are found."""
    input_decay: float = 0.25
    """Weight of an input occurrence per token that its match is shorter than P, in (0, 1]."""
    datastore_decay: float = 0.25
    """The same for occurrences in the datastore."""
    datastore_weight: float = 0.5
    """Weight of one datastore occurrence against one input occurrence."""
    datastore_cap: float = 20.0
    """Datastore evidence saturates at this count, so that the input keeps a say."""
    root_novelty: float = 0.5
    """Weight of unseen continuations at the root, in occurrences."""
    branch_novelty: float = 0.3
    """The same below the root, where the match is longer by the tokens drafted."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("prefix_length", 1, SORT_DEPTH),
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
            ("input_decay", 0.0, 1.0),
            ("datastore_decay", 0.0, 1.0),
            ("datastore_weight", 0.0, 1e6),
            ("datastore_cap", 0.0, 1e9),
            ("root_novelty", 0.0, 1e6),
            ("branch_novelty", 0.0, 1e6),
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
        """int64[6]: the whole-number options, as the compiled search reads them."""
        return np.array(
            [
                self.prefix_length,
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
        """float64[6]: the real-valued options, as the compiled search reads them."""
        return np.array(
            [
                self.input_decay,
                self.datastore_decay,
                self.datastore_weight,
                self.datastore_cap,
                self.root_novelty,
                self.branch_novelty,
            ],
            dtype=np.float64,
        )
