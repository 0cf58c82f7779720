"""SGLang's modules import `sgl_kernel`: without a GPU our stand-in must be there first."""

import pytest
from hypothesis import settings

from sglang_ext.cpu.install import install
from tests import lanes

install()
lanes.pin_worker()
# The first example pays for compilation; the machine may be busy.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lanes.arrange(items)
