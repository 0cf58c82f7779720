"""What drafters are told in the middle of a pass."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ExitView:
    """What the target's early exit says of the nodes that it verifies, in the middle of its pass.

    Attributes:
        rids: the requests, in the order of the rows below.
        tokens: int32[bs, width], each request's verified nodes, the root first.
        parents: int32[bs, width], parent node, -1 for the root.
        counts: int32[bs], how many nodes of a row are real.
        candidates: int32[bs, width, kappa], the proxy's likeliest next tokens behind each node,
            best first.
        logprobs: float32[bs, width, kappa], their log-probabilities under the proxy.
        started: seconds (time.perf_counter) when the pass began.
    """

    rids: tuple[str, ...]
    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    candidates: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    started: float
