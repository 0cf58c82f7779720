"""Where a drafted token has been seen: the bits of `sources`, here and in `sglang_ext`."""

from enum import IntFlag


class Origin(IntFlag):
    """What proposed a node of a draft; a node that several did has the bits of them all.

    A draft's `sources` hold them as int8. In metrics a bit is called by its name in lower case.
    """

    PROMPT = 1
    """The request's prompt."""
    SELF_OUTPUT = 2
    """What the request has written so far."""
    LIVE = 4
    """Served outputs of its namespace."""
    STATIC = 8
    """Shared corpora."""
    PREVIOUS_OUTPUT = 16
    """A translation session's last output, as it was; of sglang_ext's drafters."""
    REALIGNED = 32
    """A session's last output behind a place where it parted; of sglang_ext's drafters."""
    BIGRAM = 64
    """The target's own bigrams."""
