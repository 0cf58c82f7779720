"""SGLang's CPU engine for the tests of this folder, whatever the machine."""

import os

import pytest

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

from sglang_ext.cpu.install import install

install()


@pytest.fixture
def generator():
    import torch

    return torch.Generator().manual_seed(0)
