"""What a request may set for the drafter `mirror`."""

from typing import Annotated

from pydantic import Field

from sglang_ext.mirror.messages import MOST_KAPPA
from sglang_ext.request_options import DrafterOptions

# The key of custom_params under which a request sets MirrorOptions.
PARAMETER = "mirror"
_EXPECTED = {"kappa": f"a whole number of 1 to {MOST_KAPPA}"}


class MirrorOptions(DrafterOptions):
    """What a request may set in `custom_params.mirror`: less than what the server does.

    Attributes:
        exit: draft for it what the early exit foresees, while the target verifies; false: each of
            its steps waits for its draft (ordinary speculative decoding).
        retrieval: its own text drafts for the draft model.
        kappa: next tokens that are followed behind each node; None: the server's.
    """

    parameter = PARAMETER
    expected = _EXPECTED

    exit: bool = True
    retrieval: bool = True
    kappa: Annotated[int, Field(ge=1, le=MOST_KAPPA)] | None = None
