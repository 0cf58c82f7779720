"""SGLang's modules import `sgl_kernel`: without a GPU our stand-in must be there first."""

from typing import Any

import pytest
from hypothesis import settings

from sglang_ext.cpu.install import install
from tests import lanes

install()
lanes.pin_worker()
# The first example pays for compilation; the machine may be busy.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lanes.arrange(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> lanes.Lanes | None:
    """The scheduler of `--dist loadgroup`."""
    return lanes.Lanes(config, log) if config.getvalue("dist") == "loadgroup" else None
