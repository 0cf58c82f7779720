"""Where checks, benchmarks and tests find data that the repository does not hold."""

import os
from pathlib import Path

from sglang_ext.sweep.data_files import DATA_VARIABLE


def data_folder(name: str) -> Path:
    """The folder `name` ("text", "speech", "parallel") of the data sets; it may not be there.

    $SGLANG_EXT_DATA holds the folders; where it is not set, ../shared/data beside the checkout
    does. The package itself looks nowhere beside the checkout.
    """
    root = os.environ.get(DATA_VARIABLE)
    return (Path(root) if root else Path(__file__).parents[3] / "shared" / "data") / name
