import sys
from types import SimpleNamespace

import pytest

from tests.unit.api.fake_manager import FakeManager, Request


@pytest.fixture(autouse=True)
def no_sglang(monkeypatch):
    """SGLang's requests without SGLang, which takes seconds to import."""
    module = SimpleNamespace(GenerateReqInput=Request)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", module)


@pytest.fixture
def manager():
    return FakeManager()
