"""What is said over the token channel, as records.

| kind | from | first | total | length | number | items | payload |
| --- | --- | --- | --- | --- | --- | --- | --- |
| TEXT | drafter | tokens before | - | - | flags | tokens | int32[items] |
| VIEW | drafter | nodes before | nodes | of the text | kappa | nodes | items of view_dtype |
| ASK | drafter | - | - | of the text | the ask's | tokens wanted; 0: no more | - |
| CLOSE | drafter | - | - | - | - | - | - |
| STOP | drafter | - | - | - | - | - | - |
| READY | executor | - | - | positions | - | vocabulary | - |
| NODES | executor | - | - | - | - | nodes | NODE[items] |
| DONE | executor | - | - | of the text | the ask's | - | - |
| UNKNOWN | executor | - | - | tokens held | 1: for ever | - | - |
| TOTALS | executor | - | - | - | - | - | float64[len(TOTAL_NAMES)] |

`request` is a number that the drafter gives each request; TEXT with `first` 0 begins one anew, and
its flags hold from then on.
`time` is when the record was made, or for a VIEW when the target's pass began, in seconds of the
machine's monotonic clock, which all processes share.
"""

import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt

from sglang_ext.mirror.shared_ring import PAYLOAD_BYTES, ChannelError, Record


class Kind(IntEnum):
    """A record's kind."""

    TEXT = 1
    VIEW = 2
    ASK = 3
    CLOSE = 4
    STOP = 5
    READY = 6
    NODES = 7
    DONE = 8
    UNKNOWN = 9
    TOTALS = 10


# A drafted token: the key of the text that it continues (text_keys), how many tokens that text has,
# the token, and its probability under the draft model.
NODE = np.dtype([("key", "<u8"), ("length", "<i4"), ("token", "<i4"), ("prob", "<f4")])
TOTAL_NAMES = (
    "draft_steps", "draft_rows", "draft_tokens", "draft_seconds", "reading_seconds",
    "asked_steps", "asked_tokens", "cache_mb", "texts",
)  # fmt: skip
# A TEXT's flags: the text itself does not draft for the draft model; its streams do not.
NO_RETRIEVAL, NO_STREAMS = 1, 2
MOST_KAPPA = 64
_MOST_VIEW_NODES = 1024
_TOKENS = PAYLOAD_BYTES // 4
_NODES = PAYLOAD_BYTES // NODE.itemsize


@cache
def view_dtype(kappa: int) -> np.dtype:
    """A verified node: its token, its parent, and the proxy's likeliest next tokens."""
    tokens = [("token", "<i4"), ("parent", "<i4"), ("candidates", "<i4", (kappa,))]
    return np.dtype([*tokens, ("logprobs", "<f4", (kappa,))])


def text_records(
    request: int, tokens: Sequence[int], first: int, flags: int = 0
) -> Iterator[Record]:
    """The tokens of a text, behind its first `first`."""
    array = np.asarray(tokens, dtype="<i4")
    now = time.perf_counter()
    for begin in range(0, len(array), _TOKENS):
        part = array[begin : begin + _TOKENS]
        count = len(part)
        yield Record(Kind.TEXT, request, first + begin, 0, 0, flags, count, now, part.tobytes())


def view_records(
    request: int,
    length: int,
    tokens: npt.NDArray[np.int32],
    parents: npt.NDArray[np.int32],
    candidates: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    began: float,
) -> Iterator[Record]:
    """What the early exit says of one request's nodes.

    Args:
        length: of the text, whose last token is the root.
        tokens, parents: int32[nodes].
        candidates, logprobs: [nodes, kappa].
        began: when the target's pass began.
    """
    nodes, kappa = candidates.shape
    rows = np.empty(nodes, dtype=view_dtype(kappa))
    rows["token"], rows["parent"] = tokens, parents
    rows["candidates"], rows["logprobs"] = candidates, logprobs
    most = PAYLOAD_BYTES // rows.dtype.itemsize
    for first in range(0, nodes, most):
        part = rows[first : first + most]
        numbers = (first, nodes, length, kappa, len(part), began)
        yield Record(Kind.VIEW, request, *numbers, part.tobytes())


def ask_record(request: int, length: int, number: int, wanted: int) -> Record:
    """So many tokens are waited for behind a text of this length; 0: no more than there are."""
    return Record(Kind.ASK, request, 0, 0, length, number, wanted, time.perf_counter())


def node_records(request: int, nodes: Sequence[tuple[int, int, int, float]]) -> Iterator[Record]:
    """Drafted tokens of one request, as the fields of NODE."""
    array = np.array(nodes, dtype=NODE)
    for first in range(0, len(array), _NODES):
        part = array[first : first + _NODES]
        yield Record(Kind.NODES, request, items=len(part), payload=part.tobytes())


def tokens_of(record: Record) -> npt.NDArray[np.int32]:
    """int32[items], a TEXT's tokens.

    Raises:
        ChannelError: the record is not sound.
    """
    return _array(record, np.dtype("<i4"))


def nodes_of(record: Record) -> npt.NDArray[np.void]:
    """NODE[items], of a NODES.

    Raises:
        ChannelError: the record is not sound.
    """
    return _array(record, NODE)


def view_of(record: Record) -> npt.NDArray[np.void]:
    """The nodes of a VIEW.

    Raises:
        ChannelError: the record is not sound.
    """
    within = record.first >= 0 and record.first + record.items <= record.total
    if not (within and record.total <= _MOST_VIEW_NODES and 0 < record.number <= MOST_KAPPA):
        raise ChannelError(f"a view of {record.total} nodes and {record.number} candidates")
    return _array(record, view_dtype(record.number))


def totals_of(record: Record) -> dict[str, float]:
    """The executor's totals by name.

    Raises:
        ChannelError: the record is not sound.
    """
    if len(record.payload) != 8 * len(TOTAL_NAMES):
        raise ChannelError("totals of another length")
    return dict(zip(TOTAL_NAMES, np.frombuffer(record.payload, "<f8").tolist(), strict=True))


def _array(record: Record, dtype: np.dtype) -> npt.NDArray:
    if record.items < 0 or len(record.payload) != record.items * dtype.itemsize:
        raise ChannelError(f"{len(record.payload)} bytes for {record.items} items")
    return np.frombuffer(record.payload, dtype)
