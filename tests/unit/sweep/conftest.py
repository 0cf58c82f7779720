"""What the tests of the sweep's command line share."""

import pytest

from sglang_ext.commands import sweep


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is installed: everything, unless a test takes it out."""
    installed = {"arctic_inference"}
    monkeypatch.setattr(sweep, "find_spec", lambda name: name if name in installed else None)
    return installed
